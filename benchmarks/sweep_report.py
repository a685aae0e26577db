"""What the engine sweep shows: its table, the advice, the restart, the curve, a progress bar."""

from pathlib import Path

from chunk_planner import advice
from chunk_planner.cli.render import print_table
from chunk_planner.recommendation import Recommendation


def print_sweep(result: dict) -> None:
    print_table(
        (
            "budget",
            "blocks",
            "tokens/step",
            "idle %",
            "step ms p20",
            "p50",
            "p80",
            "tokens/s",
            "slowdown",
        ),
        [
            (
                row["max_num_batched_tokens"],
                row["blocks"],
                f"{row['tokens_per_step']:.0f}",
                f"{100 * row['idle_share']:.0f}",
                f"{row['step_p20_ms']:.1f}",
                f"{row['step_p50_ms']:.1f}",
                f"{row['step_p80_ms']:.1f}",
                f"{row['tokens_per_second']:.0f}",
                f"{row['slowdown']:.2f}x",
            )
            for row in result["sweep"]
        ],
        title=f"block {result['block_size']}, measured-engine on {result['engine']['device_name']}",
    )


def print_recommendation(found: Recommendation) -> None:
    print()
    for sentence in advice.reasons(found):
        print(sentence)


def print_restart(restart: dict) -> None:
    given, recommended = restart["given"], restart["recommended"]
    print(
        f"\nrestarted: {given['tokens_per_second']:.0f} tokens/s at the given budget "
        f"{given['budget']}, {recommended['tokens_per_second']:.0f} at the recommended "
        f"{recommended['budget']}: {restart['speed_up']:.2f}x (measured-engine, interleaved, "
        f"medians of {len(given['seconds'])})"
    )


def draw(result: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["sweep"]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    budgets = [row["max_num_batched_tokens"] for row in rows]
    axes.plot(budgets, [row["tokens_per_second"] for row in rows], "o-", color="tab:blue")
    given, suggested = result["given_budget"], result.get("recommended_budget")
    axes.axvline(given, color="tab:red", linestyle=":", label=f"given {given}")
    if suggested:
        axes.axvline(suggested, color="tab:green", linestyle="--", label=f"recommended {suggested}")
    axes.set(
        xlabel="max_num_batched_tokens",
        ylabel="prefill tokens per second",
        ylim=(0, None),
        title=f"{result['engine']['device_name']}, block {result['block_size']}, measured-engine",
    )
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def progress_bar():
    """A bar on stderr that is gone when it is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
