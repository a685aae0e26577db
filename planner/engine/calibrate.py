"""Measure step costs on a real engine: which workloads to run, for how long, and their points."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from chunk_planner.cost import Point
from chunk_planner.engine.step_timer import EngineInfo, Run, TimedEngine, Workload
from chunk_planner.fit import aggregate

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
    rounds: int = 0
    settled: bool = False
    stopped: str | None = None

    def points(self) -> list[Point]:
        """One point per composition of a step, over all runs."""
        steps = ((s.prefill, s.decode_kv, s.us) for run in self.runs for s in run.steps if s.tokens)
        return aggregate(steps)

    def peak_bytes(self) -> list[tuple[int, int]]:
        """(largest step in tokens, device allocator's peak in bytes), by size; empty on a CPU."""
        peaks: dict[int, int] = {}
        for run in self.runs:
            if run.peak_bytes is not None:
                size = max(step.tokens for step in run.steps)
                peaks[size] = max(peaks.get(size, 0), run.peak_bytes)
        return sorted(peaks.items())


def chunk_sizes(block: int, budget: int, most: int = 8) -> list[int]:
    """Step sizes to measure up to `budget`: parts of a block, and multiples thinned evenly in
    ratio to `most`, always with one block and the largest."""
    parts = [size for size in (block // 8, block // 4, block // 2) if 16 <= size < budget]
    largest = budget // block
    if not largest:
        return [*parts, budget]
    ratio = largest ** (1 / max(1, min(most, largest) - 1))
    multiples = {max(1, min(largest, round(ratio**i))) for i in range(most)}
    return parts + [n * block for n in sorted(multiples)]


def workloads(info: EngineInfo, context_tokens: int = CONTEXT_TOKENS) -> list[Workload]:
    """What to run on an engine to fit its step cost, the cheap and telling ones first."""
    block, budget = info.block_size, info.max_num_batched_tokens
    context = min(context_tokens, info.max_model_len - 64, info.kv_cache_tokens - 2 * block)
    sizes = chunk_sizes(block, budget)
    # An odd tail ends a prompt: its last step is none of the sizes above, as in service.
    alone = [
        Workload(size, prompts=(min(size * STEPS_PER_SIZE + size // 3, context),))
        for size in sizes
        if size <= context
    ]
    room = min(info.max_num_seqs - 1, info.kv_cache_tokens // max(1, 4 * block))
    crowds = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= room]
    middle = sizes[len(sizes) // 2]
    mixed = []
    for count, size in zip(crowds, _cycle([middle, sizes[-1], block]), strict=False):
        depth = (block // 2, 2 * block)[count % 2]
        mixed.append(
            Workload(
                min(size + count, budget),
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
    return alone + mixed + short + deep


def measure(
    engine: TimedEngine,
    plan: Sequence[Workload],
    time_limit_s: float,
    on_run: Callable[[Run], None] = lambda run: None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Measured]:
    """Run `plan` round after round until its p50s settle or time is up, yielding after each run.

    Rounds interleave the workloads, so that a slow minute hits all of them. The first run of a
    workload warms its shapes up and is not kept, unless time ends before the second.
    """
    deadline = clock() + time_limit_s
    measured = Measured()
    warm: list[Run] = []
    before: dict[tuple, float] = {}
    for number in range(MOST_ROUNDS + 1):
        for workload in plan:
            if clock() > deadline:
                seen = {run.workload for run in measured.runs}
                measured.runs += [run for run in warm if run.workload not in seen]
                measured.stopped = "time limit"
                yield measured
                return
            run = engine.run(workload)
            on_run(run)
            (measured.runs if number else warm).append(run)
            yield measured
        measured.rounds = number
        now = {(p.prefill, p.decode_kv): p.p50_us for p in measured.points()}
        moved = sorted(abs(now[k] / before[k] - 1) for k in now if k in before)
        if number >= FEWEST_ROUNDS and moved and moved[len(moved) // 2] < SETTLED:
            measured.settled = True
            return
        before = now


def _cycle(values: Sequence[int]) -> Iterator[int]:
    while True:
        yield from values
