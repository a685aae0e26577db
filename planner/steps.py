"""One scheduler step after the other, and many at once where they repeat themselves."""

from __future__ import annotations

from collections import deque
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from chunk_planner.idle import IdleReason, cut_reason
from chunk_planner.rule import Rule

if TYPE_CHECKING:
    from chunk_planner.schedule import Request


class Sequence:
    """A request on its way: prefill until `computed` reaches `prompt`, then decode.

    `total` is the prompt and the output so far, `outputs` what it still has to sample.
    """

    __slots__ = ("computed", "drafts", "index", "junction", "outputs", "prompt", "total")

    def __init__(self, index: int, request: Request) -> None:
        self.index = index
        self.prompt = self.total = request.num_prompt_tokens
        self.junction = request.shared_prefix_boundary
        self.computed = request.num_computed_tokens
        self.outputs = request.num_output_tokens
        self.drafts = 0


class _Taken(NamedTuple):
    """What one sequence got in a step, and how many tokens it moves on by when the step is over."""

    seq: Sequence
    start: int
    offered: int
    got: int
    moves: int


class _Held(NamedTuple):
    """A prefill that got less than it lacks; `split` is before the lookahead reserve."""

    seq: Sequence
    missing: int
    offered: int
    wanted: int
    split: int
    got: int
    #: the reason where the split gave nothing
    empty: IdleReason


class _Step:
    """A step in the making: what is left of the budgets, who got what, who was held back."""

    __slots__ = ("held", "inputs", "slots", "taken", "threshold", "tokens")

    def __init__(self, rule: Rule, num_requests: int) -> None:
        self.tokens = rule.scheduled_budget
        self.inputs = rule.max_num_batched_tokens
        self.slots = rule.draft_slots
        self.threshold = rule.threshold(num_requests)
        self.taken: list[_Taken] = []
        self.held: list[_Held] = []

    @property
    def offered(self) -> int:
        """What both budgets offer the next request, 0 where one is spent."""
        return max(0, min(self.tokens, self.inputs - self.slots))

    def take(self, seq: Sequence, offered: int, got: int, moves: int) -> None:
        self.taken.append(_Taken(seq, seq.computed, offered, got, moves))
        self.tokens -= got
        self.inputs -= got + self.slots


class Stepper:
    """The scheduler's queues. `step` schedules, `advance` applies what was scheduled."""

    def __init__(self, rule: Rule, most_running: int, drafts: int, accepted: int) -> None:
        self.rule = rule
        self.most_running = most_running
        self.drafts = drafts
        self.accepted = accepted
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        # of the last step
        self.idle: dict[IdleReason, int] = {}
        self.no_work = self.blocked = self.starved = 0
        self._taken: list[_Taken] = []
        self._steady = False

    def step(self) -> int:
        """Schedule one step and account for what it leaves; returns the tokens scheduled."""
        seated = len(self.running)
        step = _Step(self.rule, seated + len(self.waiting))
        prefills = self._serve_running(step)
        skipped, stop = self._admit_waiting(step, prefills)
        self.blocked = len(self.waiting) if stop == "head_of_line" else 0
        self._account(step, stop)
        self.waiting.extendleft(reversed(skipped))
        self._taken = step.taken
        self._steady = len(self.running) == seated
        return self.rule.scheduled_budget - step.tokens

    def _serve_running(self, step: _Step) -> bool:
        """The running requests, in the order of admission; says whether a prefill got tokens."""
        prefills = False
        self.starved = 0
        for seq in self.running:
            if not (offered := step.offered):
                break
            missing = seq.total + seq.drafts - seq.computed
            wanted = min(missing, offered, step.threshold or offered)
            if seq.computed >= seq.prompt:
                step.take(seq, offered, wanted, 1 + min(wanted - 1, self.accepted))
                continue
            split, got = self._cut(seq, wanted)
            if got < missing:
                step.held.append(_Held(seq, missing, offered, wanted, split, got, "starved"))
            if got:
                step.take(seq, offered, got, got)
                prefills = True
            else:
                self.starved += 1
        return prefills

    def _admit_waiting(
        self, step: _Step, prefills: bool
    ) -> tuple[list[Sequence], IdleReason | None]:
        """Admit from the waiting queue; returns who stepped aside, and what stopped the queue."""
        ran, skipped = bool(step.taken), []
        while self.waiting and (offered := step.offered):
            if len(self.running) >= self.most_running:
                return skipped, "seq_limit"
            seq = self.waiting[0]
            missing = wanted = seq.total - seq.computed
            # A request with one token to compute joins the decodes, in their width.
            padded = self.drafts > 0 and missing == 1 and not prefills and (ran or seq.computed > 0)
            if padded:
                wanted = 1 + self.drafts
                if wanted > offered:
                    return skipped, "head_of_line"
            wanted = min(wanted, offered, step.threshold or offered)
            split, got = self._cut(seq, wanted)
            if padded and 0 < split <= self.drafts:
                got = 1
            if got < missing:
                step.held.append(_Held(seq, missing, offered, wanted, split, got, "head_of_line"))
                if not split or not (got or self.rule.release.reserve_skips_waiting):
                    return skipped, "head_of_line"
            self.waiting.popleft()
            if got:
                self.running.append(seq)
                # What pads it is never accepted.
                step.take(seq, offered, got, min(got, missing))
            else:
                skipped.append(seq)
        return skipped, None

    def _cut(self, seq: Sequence, wanted: int) -> tuple[int, int]:
        """What the split makes of `wanted`, and what the lookahead reserve makes of that."""
        split = self.rule.split(seq.computed, wanted, seq.prompt, seq.total, seq.junction)
        return split, self.rule.reserve(seq.total - seq.computed, split)

    def _account(self, step: _Step, stop: IdleReason | None) -> None:
        """Charge what is left to those it could have served, in scheduler order."""
        left, threshold = step.offered, step.threshold
        self.idle = idle = {}
        for seq, missing, offered, wanted, split, got, empty in step.held:
            if not left:
                break
            if threshold and threshold < min(missing, offered):
                reason: IdleReason = "threshold"
            elif not split:
                reason = empty
            else:
                reason = cut_reason(
                    self.rule, seq.computed, wanted, split, got, seq.prompt, seq.junction
                )
            charge = min(missing - got, left)
            idle[reason] = idle.get(reason, 0) + charge
            left -= charge
        if stop:
            # Who stopped the queue has been charged, unless it was not even tried.
            tried = step.held[-1].seq if step.held else None
            for seq in self.waiting:
                if not left:
                    break
                if seq is not tried:
                    charge = min(seq.prompt - seq.computed, left)
                    idle[stop] = idle.get(stop, 0) + charge
                    left -= charge
        self.no_work = left

    def repeats(self, most: int) -> int:
        """How often the last step will repeat itself, at most `most` times.

        Everyone gets the same again as long as nobody arrives, is admitted or finishes, decodes
        have output left, and prefills move by whole blocks where the rule sees only the grid.
        """
        if not self._steady:
            return 0
        rule, block = self.rule, self.rule.block_size
        for seq, start, offered, _, moves in self._taken:
            if start >= seq.prompt:
                most = min(most, (seq.outputs - 1) // moves - 1)
            elif moves % block:
                return 0
            else:
                reach = rule.regular_until(start, seq.prompt, seq.total, seq.junction)
                reach = min(reach, seq.prompt - rule.prefill_lookahead_tokens)
                most = min(most, (reach - offered - start) // moves)
            if most <= 0:
                return 0
        return max(most, 0)

    def advance(self, repeats: int) -> list[dict[int, tuple[int, int]]]:
        """Apply the last step and its repeats; returns what each of them scheduled."""
        taken, times = self._taken, 1 + repeats
        indices = [item.seq.index for item in taken]
        columns = [
            zip(range(start, start + times * moves, moves), repeat(got), strict=False)
            for _, start, _, got, moves in taken
        ]
        rows = zip(*columns, strict=True) if taken else repeat((), times)
        steps = [dict(zip(indices, row, strict=True)) for row in rows]
        finished = False
        for seq, start, _, _, moves in taken:
            seq.computed = start + times * moves
            if seq.computed >= seq.prompt:
                sampled = 1 if start < seq.prompt else times * moves
                seq.outputs -= sampled
                seq.total = seq.computed + 1
                seq.drafts = self.drafts
                finished = finished or seq.outputs <= 0
        if finished:
            self.running[:] = [seq for seq in self.running if seq.outputs > 0]
        return steps
