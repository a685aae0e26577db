"""Measure step costs on a real engine: which workloads to run, for how long, and their points."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from chunk_planner.cost import Point
from chunk_planner.engine.step_timer import EngineInfo, Run, Workload
from chunk_planner.engine.timed_engine import TimedEngine, uninterrupted
from chunk_planner.errors import PlannerError
from chunk_planner.fit import aggregate, fit
from chunk_planner.tables import Table, engine_table

#: The p50 of every step has settled when a further round moves the median step by less than this.
SETTLED = 0.01
#: Rounds before "settled" is believed, and where measuring ends in any case.
FEWEST_ROUNDS, MOST_ROUNDS = 3, 20
#: Steps of each chunk size in a run: enough contexts to tell attention from the rest.
STEPS_PER_SIZE = 6
#: Where neither the user nor the model says how long a context to measure.
CONTEXT_TOKENS = 32768


@dataclass
class Measured:
    """What a measurement has so far; complete or not, it can be used."""

    runs: list[Run] = field(default_factory=list)
    #: the first run of every workload; used only for a workload that was not run again
    warm_up: list[Run] = field(default_factory=list)
    rounds: int = 0
    settled: bool = False
    stopped: str | None = None

    def points(self) -> list[Point]:
        """One point per composition of a step, over all runs."""
        again = {run.workload for run in self.runs}
        runs = [*self.runs, *(run for run in self.warm_up if run.workload not in again)]
        return aggregate((s.prefill, s.decode_kv, s.us) for r in runs for s in r.steps if s.tokens)

    @property
    def complete(self) -> bool:
        """Whether every workload was measured, the first (warm-up) runs aside."""
        return self.rounds > 0

    def memory(self) -> dict | None:
        """Peak memory by step size as a table keeps it, None on a CPU.

        Activation bytes per token are the slope over the step sizes: weights, cache and graphs
        are in every peak alike.
        """
        peaks: dict[int, int] = {}
        for run in [*self.runs, *self.warm_up]:
            if run.peak_bytes is not None:
                size = max(step.tokens for step in run.steps)
                peaks[size] = max(peaks.get(size, 0), run.peak_bytes)
        if len(peaks) < 2:
            return None
        small, large = min(peaks), max(peaks)
        return {
            "points": [{"step_tokens": n, "peak_bytes": peaks[n]} for n in sorted(peaks)],
            "activation_bytes_per_token": max(0, peaks[large] - peaks[small]) / (large - small),
        }


def chunk_sizes(block: int, budget: int, most: int = 8) -> list[int]:
    """Step sizes to measure up to `budget`: parts of a block, and multiples thinned evenly in
    ratio to `most`, always with one block and the largest."""
    parts = [size for size in (block // 8, block // 4, block // 2) if 16 <= size < budget]
    largest = budget // block
    if not largest:
        return [*parts, budget]
    if largest <= most:
        return parts + [n * block for n in range(1, largest + 1)]
    ratio = largest ** (1 / (most - 1))
    return parts + [n * block for n in sorted({round(ratio**i) for i in range(most)})]


def workloads(info: EngineInfo, context_tokens: int = CONTEXT_TOKENS) -> list[Workload]:
    """What to run on an engine to fit its step cost, the cheap and telling ones first."""
    block, budget = info.block_size, info.max_num_batched_tokens
    context = min(context_tokens, info.max_model_len - 64)
    sizes = chunk_sizes(block, budget)
    # An odd tail ends a prompt: its last step is none of the sizes above, as in service.
    alone = [
        Workload(size, prompts=(min(size * STEPS_PER_SIZE + size // 3, context),))
        for size in sizes
        if size <= context
    ]
    # A short prompt beside whole blocks fills a step to the budget: the range must reach it.
    rest = budget - sizes[-1]
    full = [Workload(budget, prompts=(min(3 * sizes[-1], context), rest))] if rest else []
    room = min(info.max_num_seqs - 1, info.kv_cache_tokens // max(1, 4 * block))
    crowds = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= room]
    middle = sizes[len(sizes) // 2]
    mixed = []
    for count, size in zip(crowds, _cycle([middle, sizes[-1], block]), strict=False):
        depth = (block // 2, 2 * block)[count % 2]
        decodes = count * (1 + info.num_speculative_tokens)
        mixed.append(
            Workload(
                min(size + decodes, budget),
                prompts=(min(3 * size, context),),
                decode_contexts=(min(depth, context),) * count,
            )
        )
    mixed += [
        Workload(budget, decode_contexts=(min(block, context),) * n, decode_steps=8)
        for n in crowds[::2]
    ]
    together = max(1, min(room, 6))
    short = [
        Workload(budget, prompts=(max(16, min(block, budget // together) // 2),) * together),
        Workload(budget, prompts=tuple(max(16, block // (i + 2)) for i in range(together))),
    ]
    deep = [
        Workload(sizes[-1], prompts=(context,), output_tokens=4),
        Workload(budget, decode_contexts=(context // 2,) * min(2, room), decode_steps=8),
    ]
    return [one for one in alone + full + mixed + short + deep if _fits(one, info)]


def _fits(workload: Workload, info: EngineInfo) -> bool:
    requests = [*workload.prompts, *workload.decode_contexts]
    return (
        0 < len(requests) <= info.max_num_seqs
        and max(requests) < info.max_model_len
        and sum(requests) < info.kv_cache_tokens
    )


def measure(
    engine: TimedEngine,
    plan: Sequence[Workload],
    time_limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Measured]:
    """Run `plan` round after round until its p50s settle or time is up, yielding after each run.

    Rounds interleave the workloads, so that a slow minute hits all of them. The first run of a
    workload warms its shapes up.
    """
    deadline = clock() + time_limit_s
    measured = Measured()
    before: dict[tuple, float] = {}
    for number in range(MOST_ROUNDS + 1):
        for workload in plan:
            if clock() > deadline:
                measured.stopped = "time limit"
                return
            run = engine.run(workload)
            (measured.runs if number else measured.warm_up).append(run)
            yield measured
        measured.rounds = number
        now = {(p.prefill, p.decode_kv): p.p50_us for p in measured.points()}
        moved = sorted(abs(now[k] / before[k] - 1) for k in now if k in before)
        if number >= FEWEST_ROUNDS and moved and moved[len(moved) // 2] < SETTLED:
            measured.settled = True
            return
        before = now


def calibrate(
    engine_args: dict | list[str],
    log: str | Path,
    *,
    time_limit_s: float = 120.0,
    context_tokens: int = CONTEXT_TOKENS,
    command: str = "chunk_planner.engine.calibrate.calibrate",
    env: dict | None = None,
    patch: Callable[[], None] | None = None,
    on_start: Callable[[EngineInfo, float], None] = lambda info, limit: None,
    on_run: Callable[[float, Measured], None] = lambda seconds, measured: None,
) -> Table:
    """Start an engine once, measure its steps up to its budget, and return the tuning table.

    Ctrl-C and the time limit end the measuring, not the answer: the table then says that it is
    not complete.

    Args:
        engine_args, log, env, patch: see `TimedEngine`.
        time_limit_s: for measuring, in seconds after the start.
        context_tokens: longest context to measure.
        command: what the table's provenance records.
        on_start, on_run: told once the engine runs, and after each run.

    Raises:
        PlannerError: the engine does not start, or was interrupted before it measured anything.
    """
    with TimedEngine(engine_args, log, env, patch) as engine:
        on_start(engine.info, time_limit_s)
        return measure_table(
            engine,
            time_limit_s=time_limit_s,
            context_tokens=context_tokens,
            command=command,
            on_run=on_run,
        )


def measure_table(
    engine: TimedEngine,
    *,
    time_limit_s: float = 120.0,
    context_tokens: int = CONTEXT_TOKENS,
    command: str = "chunk_planner.engine.calibrate.measure_table",
    on_run: Callable[[float, Measured], None] = lambda seconds, measured: None,
) -> Table:
    """The tuning table of an engine that runs; see `calibrate`."""
    measured = Measured()
    start = time.monotonic()
    try:
        for measured in measure(engine, workloads(engine.info, context_tokens), time_limit_s):
            on_run(time.monotonic() - start, measured)
    except (KeyboardInterrupt, PlannerError) as error:
        # an engine that died late (out of memory at the largest step) has measured the rest
        if len({point.tokens for point in measured.points()}) < 2:
            raise
        measured.stopped = str(error) or "interrupted"
    with uninterrupted():
        return _table(engine.info, measured, command, time.monotonic() - start)


def _table(info: EngineInfo, measured: Measured, command: str, seconds: float) -> Table:
    provenance = {
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command[:2000],  # what a table takes; flags may hold whole JSON documents
        "complete": measured.complete,
        "rounds": measured.rounds,
        "seconds": round(seconds, 1),
    }
    if measured.stopped:
        provenance["notes"] = [f"stopped: {measured.stopped}"]
    points = measured.points()
    return engine_table(points, fit(points), info.fingerprint, provenance, measured.memory())


def _cycle(values: Sequence[int]) -> Iterator[int]:
    while True:
        yield from values
