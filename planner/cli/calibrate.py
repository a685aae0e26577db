"""`chunk-planner calibrate`: measure step costs on a real engine and write a tuning table."""

import argparse
import importlib.util
import shlex
import sys
import tempfile
from pathlib import Path

from chunk_planner.cli import Parser
from chunk_planner.cli.options import count
from chunk_planner.cli.render import print_json, print_table
from chunk_planner.errors import PlannerError
from chunk_planner.tables import Table, load_table, merge, user_folder

#: Started where no `--max-num-batched-tokens` is given: vLLM's server default on large GPUs.
DEFAULT_BUDGET = 8192


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_own(parser)
    parser.add_argument("model", metavar="MODEL", help="as for `vllm serve`")
    parser.add_argument(
        "vllm_flags",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="any flag of vLLM's engine, as you serve with it; --max-num-batched-tokens is the "
        f"largest budget to measure (default {DEFAULT_BUDGET})",
    )


def _add_own(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    # no default here: flags are taken before and after MODEL, and the later must not undo them
    none = argparse.SUPPRESS
    add("--time-limit", type=float, default=none, metavar="S", help="after the start (default 120)")
    add(
        "--context-tokens",
        type=count,
        default=none,
        metavar="TOKENS",
        help="longest context to measure (default 32768, at most --max-model-len)",
    )
    add(
        "--output",
        type=Path,
        default=none,
        metavar="PATH",
        help="file or folder (default: the user's folder that the engine plugin searches)",
    )
    add("--merge", action="store_true", default=none, help="add to the table already there")
    add("--json", action="store_true", default=none, help="print the table as JSON")


def run(args: argparse.Namespace) -> int:
    for package in ("vllm", "scipy"):
        # before the engine starts: without scipy the fit would fail with everything measured
        if importlib.util.find_spec(package) is None:
            raise PlannerError(
                f"{package} is not installed here; 'pip install chunk-planner[engine]' beside "
                "the vLLM you serve with"
            )
    flags = _flags_after_model(args)
    for name in ("time_limit", "context_tokens"):
        if not getattr(args, name, 1) > 0:  # nan as well
            raise PlannerError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be positive"
            )
    from chunk_planner.engine.calibrate import CONTEXT_TOKENS, calibrate
    from chunk_planner.engine.timed_engine import uninterrupted

    log = Path(tempfile.mkdtemp(prefix="chunk-planner-")) / "engine.log"
    command = shlex.join(["chunk-planner", "calibrate", args.model, *flags])
    as_json = getattr(args, "json", False)
    with _Progress() as progress:
        table = calibrate(
            ["--model", args.model, *flags],
            log,
            time_limit_s=getattr(args, "time_limit", 120.0),
            context_tokens=getattr(args, "context_tokens", CONTEXT_TOKENS),
            command=command,
            on_start=progress.started,
            on_run=progress.advance,
        )
    provenance = table.data["provenance"]
    path = getattr(args, "output", None) or user_folder()
    with uninterrupted():
        table, written = _keep(table, path, getattr(args, "merge", False), log.parent)
    notes = provenance.get("notes", [])
    for note in notes:
        early = "" if provenance["complete"] else ", before every workload was measured"
        print(f"{note}{early}", file=sys.stderr)
    if as_json:
        print_json(table.data)
    else:
        print_curve(table)
    print(f"wrote {written}", file=sys.stderr)
    return 130 if "stopped: interrupted" in notes else 0


def _keep(table: Table, path: Path, merging: bool, spare: Path) -> tuple[Table, Path]:
    """Write the table, or where `path` or the table there does not take it, into `spare`."""
    if path.suffix != ".json":
        path = path / table.file_name
    try:
        if merging and path.is_file():
            table = merge(load_table(path), table)
        return table, table.write(path)
    except PlannerError as error:
        kept = table.write(spare)
        raise PlannerError(f"{error}; what was measured now is in {kept}") from None


def _flags_after_model(args: argparse.Namespace) -> list[str]:
    """Take our own flags out of what follows MODEL; the rest is vLLM's."""
    parser = Parser(prog="chunk-planner calibrate", allow_abbrev=False, add_help=False)
    _add_own(parser)
    _, flags = parser.parse_known_args(args.vllm_flags, namespace=args)
    if not any(flag.split("=")[0] == "--max-num-batched-tokens" for flag in flags):
        flags += ["--max-num-batched-tokens", str(DEFAULT_BUDGET)]
    return flags


def print_curve(table) -> None:
    """The step curve of a table, with its knee and its errors."""
    cost = table.cost
    plateau = cost.plateau()
    rows = []
    for size in cost.knots_tokens:
        if size < 16:
            continue  # decode steps, not chunks
        us = cost.step_us([(size, 0)])
        best = plateau.best_us_per_token
        rows.append((size, f"{us / 1e3:.2f}", f"{us / size:.2f}", f"{us / size / best:.2f}x"))
    print_table(
        ("step (tokens)", "time (ms)", "us per token", "against best"),
        rows,
        title=f"Prefill steps without history, {table.evidence} on "
        f"{table.fingerprint['device_name']}",
    )
    print(
        f"knee at {plateau.knee_tokens} tokens, best at {plateau.best_tokens}"
        + (" (the largest measured: measure a larger budget)" if plateau.open_ended else "")
        + f"; noise {cost.noise:.1%}; leave-one-out error of the fit {cost.error_median:.1%} "
        f"median, {cost.error_p90:.1%} p90"
    )


class _Progress:
    """A bar over the time limit, on stderr."""

    def __enter__(self) -> "_Progress":
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self.bar.start()
        self.task = self.bar.add_task("starting the engine", total=None)
        return self

    def started(self, info, time_limit_s: float) -> None:
        self.bar.update(self.task, description=f"block {info.block_size}", total=time_limit_s)

    def advance(self, elapsed_s: float, measured) -> None:
        text = f"round {measured.rounds + 1}, {sum(len(r.steps) for r in measured.runs)} steps"
        self.bar.update(self.task, completed=elapsed_s, description=text)

    def __exit__(self, *error) -> None:
        self.bar.stop()
