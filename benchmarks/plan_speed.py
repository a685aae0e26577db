#!/usr/bin/env python3
"""How fast the plan is, against the engine that it plans for.

    python benchmarks/plan_speed.py [--json] [--only plan_step_1024 ...]

Both arms run in this process, in turns; a time is the median over the turns, and every result is
compared with the engine's before any time is reported. Progress goes to stderr. Times are of this
machine; what is meant to travel is the ratio. `plan_schedule` takes minutes: the engine does.

    plan_prefill        one prompt of 1,048,576 tokens; engine: its split in a loop
    plan_step_1024      one step, 1000 decodes and 24 prefills; engine: its split in a loop that
                        carries the budget
    plan_step_4096      the same with 4000 decodes and 96 prefills
    plan_step_schedule  one step of 1024 requests; engine: the whole of `Scheduler.schedule`
    plan_schedule       353 prompts of about 230,000 tokens, 600 output tokens each, 16 at a time,
                        to their end; engine: `schedule` and `update_from_output`
    cold_start          `chunk-planner plan ... --json` from process start to answer, over
                        `python -c 'import numpy'`; here less is better
"""

import argparse
import gc
import json
import logging
import os
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "support")]
logging.disable(logging.WARNING)  # the engine's own start-up lines
import _checkout  # noqa: E402, F401
import numpy as np  # noqa: E402
import vllm  # noqa: E402
from real_scheduler import build_scheduler, chunk_rule, run_schedule  # noqa: E402

from chunk_planner.batch import plan_step  # noqa: E402
from chunk_planner.cli.render import print_json, print_table  # noqa: E402
from chunk_planner.plan import plan_prefill  # noqa: E402
from chunk_planner.schedule import Request, plan_schedule  # noqa: E402

BLOCK = 1152
VERSION = ".".join(vllm.__version__.split(".")[:2])
#: ratio -> its bar; cold_start is a most, the others are a least
BARS = {
    "plan_prefill": 50,
    "plan_step_1024": 5,
    "plan_step_4096": 15,
    "plan_step_schedule": 100,
    "plan_schedule": 15,
    "cold_start": 4,
}


class SplitRequest:
    """The four numbers a split reads, as cheap for the engine as they can be."""

    __slots__ = ("num_computed_tokens", "num_prompt_tokens", "num_tokens", "shared_prefix_boundary")

    def __init__(self, computed: int, tokens: int, prompt: int) -> None:
        self.num_computed_tokens = computed
        self.num_tokens = tokens
        self.num_prompt_tokens = prompt
        self.shared_prefix_boundary = 0


def prefill_case(repeats: int) -> Iterator[dict]:
    prompt, budget = 1_048_576, 2048
    scheduler = build_scheduler(block_size=BLOCK, max_num_batched_tokens=budget)
    rule, split = chunk_rule(scheduler, VERSION), scheduler._mamba_block_aligned_split

    def ours() -> list[int]:
        return list(plan_prefill(rule, prompt).chunks)

    def engine() -> list[int]:
        request = SplitRequest(0, prompt, prompt)
        chunks = []
        while request.num_computed_tokens < prompt:
            wanted = min(prompt - request.num_computed_tokens, budget)
            chunks.append(split(request, wanted))
            request.num_computed_tokens += chunks[-1]
        return chunks

    check_equal("plan_prefill", ours(), engine())
    times = in_turns({"ours": ours, "engine": engine}, repeats)
    yield row("plan_prefill", times, tokens=prompt, chunks=len(ours()))


def step_case(decodes: int, prefills: int, repeats: int) -> Iterator[dict]:
    """A step of decodes, then prefills one block into their prompt, the last half still waiting."""
    budget, waiting = 2 * decodes + 8192, prefills // 2
    requests = [SplitRequest(500 + i % 300, 501 + i % 300, 400) for i in range(decodes)]
    requests += [SplitRequest(BLOCK, 230_000, 230_000) for _ in range(prefills - waiting)]
    requests += [SplitRequest(0, 230_000, 230_000) for _ in range(waiting)]
    scheduler = build_scheduler(
        block_size=BLOCK, max_num_batched_tokens=budget, max_num_seqs=len(requests)
    )
    rule, split = chunk_rule(scheduler, VERSION), scheduler._mamba_block_aligned_split
    columns = [
        np.array([getattr(request, name) for request in requests], np.int32)
        for name in ("num_computed_tokens", "num_tokens", "num_prompt_tokens")
    ]
    drafts = np.zeros(len(requests), np.int32)
    is_waiting = np.arange(len(requests)) >= len(requests) - waiting
    running, queued = requests[: len(requests) - waiting], requests[len(requests) - waiting :]

    def ours() -> np.ndarray:
        return plan_step(rule, *columns, drafts, is_waiting).num_scheduled_tokens

    def engine() -> list[int]:
        left, sizes = budget, []
        for request in running:
            if left <= 0:
                break
            size = split(request, min(request.num_tokens - request.num_computed_tokens, left))
            sizes.append(size)
            left -= size
        for request in queued:
            if left <= 0:
                break
            size = split(request, min(request.num_tokens - request.num_computed_tokens, left))
            if size == 0:
                break
            sizes.append(size)
            left -= size
        return sizes + [0] * (len(requests) - len(sizes))

    name = f"plan_step_{len(requests)}"
    check_equal(name, ours().tolist(), engine())
    times = in_turns({"ours": ours, "engine": engine}, repeats)
    yield row(name, times, decodes=decodes, prefills=prefills, budget=budget)


def whole_step_case(repeats: int) -> Iterator[dict]:
    """1000 decodes and 24 long prompts in the real scheduler; every measured step is compared."""
    budget = 8192
    scheduler = build_scheduler(
        block_size=BLOCK, max_num_batched_tokens=budget, max_num_seqs=1024, num_blocks=100_000
    )
    rule, schedule = chunk_rule(scheduler, VERSION), scheduler.schedule
    times: dict[str, list[float]] = {"ours": [], "engine": []}

    def both() -> object:
        state = [*scheduler.running, *scheduler.waiting]
        if len(state) < 1024:  # before the long prompts arrive
            return schedule()
        columns = [
            np.array([getattr(request, name) for request in state], np.int32)
            for name in ("num_computed_tokens", "num_tokens", "num_prompt_tokens")
        ]
        drafts = np.array([len(request.spec_token_ids) for request in state], np.int32)
        is_waiting = np.arange(1024) >= len(scheduler.running)
        names = [request.request_id for request in state]
        step = plan_step(rule, *columns, drafts, is_waiting, max_num_seqs=1024)
        sample, _ = timed(lambda: plan_step(rule, *columns, drafts, is_waiting, max_num_seqs=1024))
        times["ours"].append(sample)
        begin = perf_counter()
        output = schedule()
        times["engine"].append(perf_counter() - begin)
        planned = zip(names, step.num_scheduled_tokens.tolist(), strict=True)
        check_equal(
            "plan_step_schedule",
            {name: size for name, size in planned if size},
            output.num_scheduled_tokens,
        )
        return output

    scheduler.schedule = both
    requests = [Request(0, 16, 10_000) for _ in range(1000)]
    requests += [Request(4, 230_000, 10) for _ in range(24)]
    run_schedule(scheduler, requests, max_steps=4 + repeats)
    yield row("plan_step_schedule", times, decodes=1000, prefills=24, budget=budget)


def schedule_case(repeats: int) -> Iterator[dict]:
    """At most three turns: one of the engine is 71,000 steps."""
    rng = random.Random(353)
    requests = [Request(0, rng.randint(220_000, 240_000), 600) for _ in range(353)]
    budgets = {"block_size": BLOCK, "max_num_batched_tokens": 2048, "max_num_seqs": 16}
    rule = chunk_rule(build_scheduler(**budgets), VERSION)

    def ours() -> object:
        return plan_schedule(rule, requests, max_num_seqs=16)

    plan = ours()
    times: dict[str, list[float]] = {"ours": [], "engine": []}
    for turn in range(min(repeats, 3)):
        progress(f"plan_schedule, turn {turn + 1} of {min(repeats, 3)}")
        times["ours"].append(timed(ours)[0])
        spent, steps = engine_schedule(build_scheduler(**budgets), requests, len(plan.steps))
        check_equal("plan_schedule", plan.steps, steps)
        times["engine"].append(spent)
    prompt_tokens = sum(request.num_prompt_tokens for request in requests)
    yield row(
        "plan_schedule",
        times,
        requests=len(requests),
        steps=len(plan.steps),
        prompt_tokens=prompt_tokens,
    )


def engine_schedule(scheduler, requests: list[Request], expected: int) -> tuple[float, list]:
    """Seconds in `schedule` and `update_from_output` alone, and what each step scheduled."""
    spent = 0.0

    def clocked(method: Callable) -> Callable:
        def call(*args: object) -> object:
            nonlocal spent
            begin = perf_counter()
            result = method(*args)
            spent += perf_counter() - begin
            return result

        return call

    def schedule() -> object:
        if scheduler.current_step % 10_000 == 0:
            progress(f"  step {scheduler.current_step:,} of {expected:,} of the engine")
        return engines_schedule()

    engines_schedule = clocked(scheduler.schedule)
    scheduler.schedule = schedule
    scheduler.update_from_output = clocked(scheduler.update_from_output)
    steps = run_schedule(scheduler, requests, max_steps=10**6)
    return spent, steps


def cold_case(repeats: int) -> Iterator[dict]:
    command = [str(Path(sys.executable).with_name("chunk-planner")), "plan", "--json"]
    for flag, value in {
        "block-size": BLOCK,
        "max-num-batched-tokens": 2048,
        "prompt-tokens": 230_000,
        "vllm-version": VERSION,
    }.items():
        command += [f"--{flag}", str(value)]
    numpy = [sys.executable, "-c", "import numpy"]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    rule = chunk_rule(build_scheduler(block_size=BLOCK, max_num_batched_tokens=2048), VERSION)
    check_equal("cold_start", answer["chunks"], list(plan_prefill(rule, 230_000).chunks))
    arms = {"ours": command, "import numpy": numpy}
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(repeats):
        for arm, argv in arms.items():
            begin = perf_counter()
            subprocess.run(argv, check=True, capture_output=True)
            times[arm].append(perf_counter() - begin)
    result = row("cold_start", times)
    result["ratio"] = 1 / result["ratio"]
    result["imports_us"] = import_times(command)
    yield result


def import_times(command: list[str], most: int = 15) -> dict[str, int]:
    """Microseconds by module (its own, not what it imports), the slowest first."""
    script = "import sys; from chunk_planner.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script, *command[1:]],
        check=True,
        capture_output=True,
        text=True,
    )
    lines = re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", done.stderr)
    return {name: int(own) for own, name in sorted(lines, key=lambda l: -int(l[0]))[:most]}


CASES: dict[str, Callable[[int], Iterator[dict]]] = {
    "plan_prefill": prefill_case,
    "plan_step_1024": lambda repeats: step_case(1000, 24, repeats),
    "plan_step_4096": lambda repeats: step_case(4000, 96, repeats),
    "plan_step_schedule": whole_step_case,
    "cold_start": cold_case,
    "plan_schedule": schedule_case,
}


def in_turns(arms: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds per call of each arm, sampled one arm after the other, `repeats` times."""
    calls = {name: timed(arm)[1] for name, arm in arms.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            times[name].append(timed(arm, calls[name])[0])
    return times


def timed(
    arm: Callable[[], object], calls: int | None = None, least_seconds: float = 0.01
) -> tuple[float, int]:
    """Seconds per call over `calls` calls, or as many as take `least_seconds`; and how many."""
    gc.collect()
    gc.disable()
    try:
        total = calls or 1
        while True:
            begin = perf_counter()
            for _ in range(total):
                arm()
            spent = perf_counter() - begin
            if calls or spent >= least_seconds:
                return spent / total, total
            total *= 2
    finally:
        gc.enable()


def check_equal(name: str, ours: object, engine: object) -> None:
    if ours != engine:
        raise SystemExit(f"{name}: the plan is not what the engine does; no time is reported")


def row(name: str, times: dict[str, list[float]], **what: object) -> dict:
    medians = {arm: 1e6 * statistics.median(samples) for arm, samples in times.items()}
    (ours, other), samples = medians.values(), len(next(iter(times.values())))
    arms = {f"{arm.replace(' ', '_')}_us": round(value, 2) for arm, value in medians.items()}
    return {"name": name, **what, **arms, "ratio": other / ours, "repeats": samples}


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--repeats", type=int, default=21, help="turns per arm (default 21)")
    args = parser.parse_args(argv)
    rows = []
    try:
        for name in args.only or CASES:
            progress(f"{name} ...")
            rows += CASES[name](args.repeats)
    except KeyboardInterrupt:
        progress("interrupted; the cases that had finished follow")
    ratios = {each["name"]: round(each["ratio"], 2) for each in rows}
    rows = [{**each, "ratio": ratios[each["name"]], "bar": BARS[each["name"]]} for each in rows]
    if args.json:
        machine = {
            "python": sys.version.split()[0],
            "numpy": np.__version__,
            "cpus": os.cpu_count(),
        }
        print_json({"ratios": ratios, "rows": rows, "vllm_version": vllm.__version__, **machine})
    else:
        print_table(
            ("case", "ours, us", "other, us", "ratio", "bar", "turns"),
            [
                (
                    each["name"],
                    each["ours_us"],
                    each.get("engine_us", each.get("import_numpy_us")),
                    each["ratio"],
                    f"{'<=' if each['name'] == 'cold_start' else '>='} {each['bar']}",
                    each["repeats"],
                )
                for each in rows
            ],
            title=f"vLLM {vllm.__version__}; every result equal to the engine's",
        )
    return 0 if len(rows) == len(args.only or CASES) else 130


if __name__ == "__main__":
    sys.exit(main())
