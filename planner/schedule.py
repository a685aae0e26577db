"""A whole request mix, step by step, as vLLM's scheduler runs it: FCFS, KV cache without limit.

`plan_schedule` follows `Scheduler.schedule` and `Scheduler.update_from_output`
(`vllm/v1/core/sched/scheduler.py`) for text requests in one engine: the running requests in the
order of their admission, then the waiting queue up to the first request that gets nothing.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from chunk_planner.errors import PlannerError
from chunk_planner.idle import IdleReason
from chunk_planner.rule import Rule
from chunk_planner.stall import Stall, find_stall
from chunk_planner.steps import Sequence, Stepper


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Sizes in tokens.

    Args:
        arrival_step: the first step that sees it in the waiting queue.
        num_prompt_tokens: length of the prompt.
        num_output_tokens: tokens it samples before it ends, at least 1.
        num_computed_tokens: its prefix hit; the last token of a prompt is always computed.
        shared_prefix_boundary: where the prefix it shares with an earlier request ends, 0 for none.

    Raises:
        PlannerError: a value outside its range, by name.
    """

    arrival_step: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int = 0
    shared_prefix_boundary: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            least = 1 if item.name in ("num_prompt_tokens", "num_output_tokens") else 0
            if value < least:
                raise PlannerError(f"{item.name} = {value} must be at least {least}")
        if self.num_computed_tokens >= self.num_prompt_tokens:
            raise PlannerError(
                f"num_computed_tokens = {self.num_computed_tokens} must be below "
                f"num_prompt_tokens = {self.num_prompt_tokens}"
            )


@dataclass(slots=True)
class Schedule:
    """What was scheduled, and what was not. All lists have one entry per step.

    Where consecutive steps are alike their `idle_tokens` are one and the same mapping.
    """

    #: request index -> (tokens computed before the step, tokens scheduled), in scheduler order
    steps: list[dict[int, tuple[int, int]]] = field(default_factory=list)
    #: tokens of the budgets left idle, by reason; reasons without any are left out
    idle_tokens: list[dict[IdleReason, int]] = field(default_factory=list)
    #: tokens of the budgets that no prefill could have used
    no_work_tokens: list[int] = field(default_factory=list)
    #: requests waiting at and behind the one that stopped the queue
    blocked_requests: list[int] = field(default_factory=list)
    #: running prefills that were tried and got nothing
    starved_requests: list[int] = field(default_factory=list)
    #: why no later step can make progress
    stall: Stall | None = None
    #: `max_steps` ended the schedule with requests unfinished
    truncated: bool = False

    @property
    def starved_steps(self) -> int:
        """Steps in which a prefill was tried, running or waiting, and got nothing."""
        tried = zip(self.blocked_requests, self.starved_requests, strict=True)
        return sum(1 for blocked, starved in tried if blocked or starved)

    @property
    def stalled(self) -> str | None:
        """Why no later step can make progress, None unless requests are left that never finish."""
        return self.stall.text if self.stall else None


def plan_schedule(
    rule: Rule,
    requests: Iterable[Request],
    *,
    max_num_seqs: int,
    max_num_active_seqs: int | None = None,
    num_speculative_tokens: int = 0,
    accepted_tokens: int = 0,
    max_steps: int = 1_000_000,
) -> Schedule:
    """Schedule `requests` to their end.

    From its first sampled token on, a request carries `num_speculative_tokens` drafts into each
    step; of those scheduled, up to `accepted_tokens` are accepted. No `max_model_len` cuts drafts.

    Args:
        rule: a `ChunkRule`, or a live scheduler's (`chunk_planner.engine.live_rule`).
        requests: in any order; equal arrivals queue in the order given.
        max_num_seqs: most running requests.
        max_num_active_seqs: a lower limit on admission, from vLLM 0.31; None for none.
        max_steps: stop here; says so in `truncated`.

    Raises:
        PlannerError: a value outside its range, by name.
    """
    _check(
        max_num_seqs=max_num_seqs,
        max_num_active_seqs=max_num_active_seqs,
        num_speculative_tokens=num_speculative_tokens,
        accepted_tokens=accepted_tokens,
        max_steps=max_steps,
    )
    if max_num_active_seqs and not rule.release.has_active_seqs:
        raise PlannerError(
            f"max_num_active_seqs = {max_num_active_seqs} must be left out before vLLM 0.31 "
            f"(this rule is of {rule.release.version})"
        )
    requests = list(requests)
    arrivals = deque(sorted(range(len(requests)), key=lambda index: requests[index].arrival_step))
    most_running = min(max_num_seqs, max_num_active_seqs or max_num_seqs)
    stepper = Stepper(rule, most_running, num_speculative_tokens, accepted_tokens)
    waiting, running = stepper.waiting, stepper.running
    schedule = Schedule()
    while arrivals or waiting or running:
        now = len(schedule.steps)
        if now >= max_steps:
            schedule.truncated = True
            break
        while arrivals and requests[arrivals[0]].arrival_step <= now:
            index = arrivals.popleft()
            waiting.append(Sequence(index, requests[index]))
        scheduled = stepper.step()
        if not scheduled and not arrivals:
            stuck = running[0] if running else waiting[0]
            schedule.stall = find_stall(rule, stuck.computed, stuck.prompt, stuck.junction)
            break
        next_arrival = requests[arrivals[0]].arrival_step if arrivals else max_steps
        repeats = stepper.repeats(min(next_arrival, max_steps) - now - 1)
        times = 1 + repeats
        schedule.steps += stepper.advance(repeats)
        schedule.idle_tokens += [stepper.idle] * times
        schedule.no_work_tokens += [stepper.no_work] * times
        schedule.blocked_requests += [stepper.blocked] * times
        schedule.starved_requests += [stepper.starved] * times
    return schedule


def _check(**counts: int | None) -> None:
    least = {"num_speculative_tokens": 0, "accepted_tokens": 0}
    for name, value in counts.items():
        if value is not None and value < least.get(name, 1):
            raise PlannerError(f"{name} = {value} must be at least {least.get(name, 1)}")
