"""Measure what an idle prefill budget costs on a real engine, then prove the suggested one.

One engine start at the largest budget measures every smaller one. The recommendation made from it
is confirmed by restarts with the given and the recommended budget, prompts interleaved.
"""

import argparse
import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from sweep_report import draw, print_recommendation, print_restart, print_sweep, progress_bar

from chunk_planner.budget import recommend
from chunk_planner.cli.options import json_object
from chunk_planner.engine.step_timer import EngineInfo, Run, Workload
from chunk_planner.engine.timed_engine import TimedEngine
from chunk_planner.errors import PlannerError
from chunk_planner.fit import aggregate, fit
from chunk_planner.plan import plan_prefill
from chunk_planner.rule import SUPPORTED_VERSIONS, ChunkRule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, default=Path("sweep-out"), help="folder for JSON, PNG, engine logs")
    add("--model", help="model to serve; default: a tiny hybrid model made up here")
    add("--block-size", type=int, help="default 64 for the tiny model, else vLLM's choice")
    add("--budget", type=int, help="the budget in use today (default: 100, or 8192 with --model)")
    add("--max-budget", type=int, help="largest budget to measure (default: 16 blocks and a bit)")
    add("--prompt-tokens", type=int, default=4096)
    add("--max-num-seqs", type=int, default=8)
    add("--expected-decodes", type=int, default=4, help="decodes that share a step")
    add("--engine-args", type=json_object, default={}, help="more vLLM engine arguments, as JSON")
    add("--repeats", type=int, default=5, help="timed prompts per budget and per restart")
    add("--no-restart", action="store_true", help="sweep only; do not confirm by restarts")
    add("--json", action="store_true", help="print the result as JSON as well")


@dataclass(frozen=True)
class Engine:
    """How to start the engine: the same arguments every time, but for the budget."""

    args: dict
    env: dict
    out: Path

    def start(self, budget: int, name: str) -> TimedEngine:
        log = self.out / f"engine-{name}.log"
        return TimedEngine(self.args | {"max_num_batched_tokens": budget}, log, self.env)


def run(args: argparse.Namespace) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    result: dict = {"evidence": "measured-engine", "command": " ".join(sys.argv)}
    code = 0
    try:
        _measure(args, result)
    except KeyboardInterrupt:
        code = 130
        print("interrupted: what was measured is kept", file=sys.stderr)
    except PlannerError as error:
        code = 2
        print(f"chunk_sweep: {error}", file=sys.stderr)
    if "sweep" in result:
        (args.out / "sweep.json").write_text(json.dumps(result, indent=1) + "\n")
        draw(result, args.out / "sweep.png")
        print(f"\nwrote {args.out / 'sweep.json'} and {args.out / 'sweep.png'}")
    if args.json:
        print(json.dumps(result, indent=1))
    return code


def _measure(args: argparse.Namespace, result: dict) -> None:
    """Sweep, recommend, restart; `result` has what was measured, however far it came."""
    engine = _engine(args)
    block = engine.args.get("block_size")
    given = args.budget or (8192 if args.model else 100)
    largest = args.max_budget or (16 * block + 64 if block else max(16384, given))
    with progress_bar() as progress, contextlib.ExitStack() as at_end:
        task = progress.add_task("starting the engine", total=None)
        started = at_end.enter_context(engine.start(largest, "sweep"))
        info = started.info
        if not info.aligned:
            raise PlannerError(
                f"{args.model} is served without mamba_cache_mode=align: chunks end anywhere"
            )
        if info.rule is None:
            raise PlannerError(
                f"vLLM {info.fingerprint['vllm_version']} is not one of "
                f"{', '.join(SUPPORTED_VERSIONS)}: its chunks are not known"
            )
        rule = info.rule.with_budget(given)
        result |= {"engine": info.fingerprint, "block_size": info.block_size}
        result |= {"prompt_tokens": args.prompt_tokens, "given_budget": given}
        runs: list[Run] = []
        at_end.callback(_keep_sweep, result, runs, rule)
        _sweep(started, _budgets(info, given), args, runs, progress, task)
    # Whole steps of all runs: the decodes' too, which the recommendation leaves room for.
    cost = fit(aggregate((s.prefill, s.decode_kv, s.us) for run in runs for s in run.steps))
    found = recommend(
        rule,
        max_num_seqs=args.max_num_seqs,
        expected_decodes=args.expected_decodes,
        prompt_tokens=args.prompt_tokens,
        cost=cost,
    )
    recommended = found.recommended.max_num_batched_tokens
    result["recommended_budget"] = recommended
    print_recommendation(found)
    if args.no_restart or recommended == given:
        return
    seconds: dict[int, list[float]] = {given: [], recommended: []}
    try:
        _confirm(engine, seconds, args, together=info.device_type == "cpu")
    finally:
        if all(seconds.values()):
            result["restart"] = _restart_summary(seconds, args.prompt_tokens)
            print_restart(result["restart"])


def _keep_sweep(result: dict, runs: list[Run], rule: ChunkRule) -> None:
    rows = _rows(runs, rule)
    if rows:
        result["sweep"] = rows
        print_sweep(result)


def _engine(args: argparse.Namespace) -> Engine:
    base = {
        "max_num_seqs": args.max_num_seqs,
        "max_model_len": args.prompt_tokens + 256,
        "enable_prefix_caching": True,
    }
    if args.model:
        base["model"] = args.model
        if args.block_size:
            base["block_size"] = args.block_size
        return Engine(base | args.engine_args, {}, args.out)
    from chunk_planner.engine.tiny_model import TINY_ENGINE_ENV, tiny_engine_args, write_tiny_model

    block = args.block_size or 64
    model = write_tiny_model(args.out / "tiny-model", block=block)
    base |= {"model": str(model)} | tiny_engine_args(block)
    return Engine(base | args.engine_args, TINY_ENGINE_ENV, args.out)


def _budgets(info: EngineInfo, given: int) -> list[int]:
    """The given budget and every number of blocks, thinned in ratio, up to the started budget."""
    from chunk_planner.engine.calibrate import chunk_sizes

    whole = [n for n in chunk_sizes(info.block_size, info.max_num_batched_tokens) if n % 2 == 0]
    usable = [n for n in whole if n >= info.block_size // 2]
    return sorted({*usable, min(given, info.max_num_batched_tokens)})


def _sweep(engine: TimedEngine, budgets, args, runs: list[Run], progress, task) -> None:
    """Each budget in turn, round after round; the first round warms up and is not kept."""
    prompt = args.prompt_tokens
    plan = [Workload(budget, prompts=(prompt,)) for budget in budgets]
    # Mixed steps, for the price of a decode's wait; not part of the table below.
    depth = min(engine.info.block_size, prompt)
    decodes = (depth,) * min(args.expected_decodes, args.max_num_seqs - 1)
    if decodes:
        middle = [budgets[0], budgets[len(budgets) // 2], budgets[-1]]
        plan += [
            Workload(b, prompts=(min(prompt, 3 * b),), decode_contexts=decodes) for b in middle
        ]
    progress.update(task, total=len(plan) * (args.repeats + 1), description="warming up")
    for repeat in range(args.repeats + 1):
        for workload in plan:
            run = engine.run(workload)
            if repeat:
                runs.append(run)
            progress.update(task, advance=1, description=f"budget {workload.budget}")


def _rows(runs: list[Run], rule: ChunkRule) -> list[dict]:
    """One row a budget, from the runs of a lone prompt."""
    rows = []
    alone = [run for run in runs if not run.workload.decode_contexts]
    for budget in sorted({run.workload.budget for run in alone}):
        mine = [run for run in alone if run.workload.budget == budget]
        plan = plan_prefill(rule.with_budget(budget), mine[0].workload.prompts[0])
        chunks = [[n for n, _ in step.prefill] for step in mine[0].steps]
        if [sum(c) for c in chunks] != list(plan.chunks):
            raise PlannerError(f"budget {budget}: the engine scheduled {chunks}, not {plan.chunks}")
        # The last chunk is a remainder; the repeating steps are what the budget stands for.
        steps = [step.us / 1e3 for run in mine for step in run.steps[:-1] or run.steps]
        p20, p50, p80 = _p(steps)
        seconds = _p([run.seconds for run in mine])[0]
        rows.append(
            {
                "max_num_batched_tokens": budget,
                "blocks": budget // rule.block_size,
                "tokens_per_step": plan.tokens_per_step,
                "idle_share": plan.idle_share,
                "step_p20_ms": p20,
                "step_p50_ms": p50,
                "step_p80_ms": p80,
                "tokens_per_second": mine[0].workload.prompts[0] / seconds,
                "repeats": len(mine),
            }
        )
    if rows:
        best = max(row["tokens_per_second"] for row in rows)
        for row in rows:
            row["slowdown"] = best / row["tokens_per_second"]
    return rows


def _p(values: list[float]) -> tuple[float, float, float]:
    """p20, p50, p80."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    cuts = quantiles(values, n=10, method="inclusive")
    return cuts[1], cuts[4], cuts[7]


def _confirm(engine: Engine, seconds: dict[int, list[float]], args, together: bool) -> None:
    """Start with each budget and time prompts in turn, into `seconds`; the first warms up.

    On a CPU both engines run at once; a GPU holds one, so the starts alternate, twice each.
    """
    workloads = {budget: Workload(budget, prompts=(args.prompt_tokens,)) for budget in seconds}

    def one(started: TimedEngine, budget: int, keep: bool) -> None:
        run = started.run(workloads[budget])
        if keep:
            seconds[budget].append(run.seconds)
        progress.update(task, advance=1, description=f"restarted, budget {budget}")

    with contextlib.ExitStack() as at_end:
        progress = at_end.enter_context(progress_bar())
        task = progress.add_task("restarting", total=None)
        if together:
            engines = {
                budget: at_end.enter_context(engine.start(budget, f"restart-{budget}"))
                for budget in seconds
            }
            progress.update(task, total=2 * (args.repeats + 1))
            for repeat in range(args.repeats + 1):
                for budget, started in engines.items():
                    one(started, budget, keep=repeat > 0)
            return
        half = -(-args.repeats // 2)
        progress.update(task, total=4 * (half + 1))
        for number, budget in enumerate([*seconds] * 2):
            with engine.start(budget, f"restart-{number}-{budget}") as started:
                for repeat in range(half + 1):
                    one(started, budget, keep=repeat > 0)


def _restart_summary(seconds: dict[int, list[float]], prompt_tokens: int) -> dict:
    rows = [
        {
            "budget": budget,
            "tokens_per_second": prompt_tokens / median(values),
            "seconds": values,
        }
        for budget, values in seconds.items()
    ]
    given, recommended = rows
    speed_up = recommended["tokens_per_second"] / given["tokens_per_second"]
    return {"given": given, "recommended": recommended, "speed_up": speed_up}
