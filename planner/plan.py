"""One prompt from start to end: its chunks, its steps, and what they leave idle."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from chunk_planner.chunks import Chunks
from chunk_planner.errors import PlannerError
from chunk_planner.idle import IdleReason, cut_reason
from chunk_planner.rule import Rule
from chunk_planner.stall import Stall, find_stall, room_tokens

#: Longer than any prompt: what the repeating cycle is read from.
_ENDLESS = 1 << 60


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """What the scheduler does with one prompt while the same decodes run ahead of it.

    Sizes in tokens, one chunk a step. A stalled plan holds the chunks before the stall.
    """

    rule: Rule = field(repr=False)
    num_prompt_tokens: int
    num_computed_tokens: int
    decode_tokens: int
    shared_prefix_boundary: int
    chunks: Chunks
    #: mean chunk over the repeating cycle of a long prompt beside these decodes
    tokens_per_step: float
    #: 1 - tokens per step / the smaller budget for a long prompt without decodes
    idle_share: float
    #: 1 - tokens_per_step / the room that these decodes leave (0 where they leave none)
    idle_share_with_decodes: float
    #: idle tokens of all steps of this prompt, by reason; reasons without any are left out
    idle_tokens: Mapping[IdleReason, int]
    #: budget that was left because the prompt had nothing more to compute
    no_work_tokens: int
    stall: Stall | None

    @property
    def steps(self) -> int:
        """Steps from the first chunk to the last."""
        return len(self.chunks)

    @property
    def stalled(self) -> str | None:
        """Why the prompt makes no progress while these decodes last, None if it does."""
        return self.stall.text if self.stall else None

    @property
    def checkpoints(self) -> list[int]:
        """Positions whose recurrent state is cached, before the engine's retention drops any."""
        prompt, junction = self.num_prompt_tokens, self.shared_prefix_boundary
        positions = []
        end = self.num_computed_tokens
        for chunk in self.chunks:
            start, end = end, end + chunk
            # A backend that exports from inside a chunk does so in each that has room for it.
            if inside := self.rule.exported_checkpoint(start, end, end):
                positions.append(inside)
            if self.rule.caches_state(end, prompt, junction):
                positions.append(end)
        return positions


def plan_prefill(
    rule: Rule,
    num_prompt_tokens: int,
    num_computed_tokens: int = 0,
    decode_tokens: int = 0,
    *,
    decode_requests: int | None = None,
    shared_prefix_boundary: int = 0,
) -> ChunkPlan:
    """Plan one prompt, alone or behind decodes that last as long as it does.

    Args:
        rule: a `ChunkRule`, or a live scheduler's (`chunk_planner.engine.live_rule`).
        num_prompt_tokens: its length.
        num_computed_tokens: a prefix hit.
        decode_tokens: tokens that decodes ahead of it take from every step.
        decode_requests: how many requests these are (each is charged the draft slots); None:
            one for each token.
        shared_prefix_boundary: where the prefix it shares with an earlier prompt ends, 0 for none.

    Raises:
        PlannerError: a value outside its range, by name.
    """
    decode_requests = decode_tokens if decode_requests is None else decode_requests
    _check(num_prompt_tokens, num_computed_tokens, decode_tokens, decode_requests)
    if shared_prefix_boundary < 0:
        raise PlannerError(f"shared_prefix_boundary = {shared_prefix_boundary} must be at least 0")
    prompt = _Prompt(
        rule, num_prompt_tokens, shared_prefix_boundary, decode_tokens, decode_requests
    )
    runs: list[tuple[tuple[int, ...], int]] = []
    idle: dict[IdleReason, int] = {}
    no_work = 0
    start = num_computed_tokens
    while start < num_prompt_tokens:
        stretch = prompt.stretch(start)
        if not stretch.pattern:
            break
        _append(runs, tuple(stretch.pattern), stretch.times)
        for reason, charge in stretch.idle.items():
            idle[reason] = idle.get(reason, 0) + charge * stretch.times
        no_work += stretch.no_work
        start += sum(stretch.pattern) * stretch.times
    stall = None
    if start < num_prompt_tokens:
        beside = prompt.room if decode_tokens else None
        stall = find_stall(rule, start, num_prompt_tokens, shared_prefix_boundary, beside)

    with_decodes = _tokens_per_step(rule, prompt.most)
    alone = with_decodes
    if decode_requests:
        lone = room_tokens(rule)
        alone = _tokens_per_step(rule, min(lone, rule.threshold(1) or lone))
    return ChunkPlan(
        rule=rule,
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        decode_tokens=decode_tokens,
        shared_prefix_boundary=shared_prefix_boundary,
        chunks=Chunks(runs),
        tokens_per_step=with_decodes,
        idle_share=1 - alone / min(rule.scheduled_budget, rule.max_num_batched_tokens),
        idle_share_with_decodes=1 - with_decodes / prompt.room if prompt.room > 0 else 0.0,
        idle_tokens=idle,
        no_work_tokens=no_work,
        stall=stall,
    )


@dataclass(slots=True)
class _Stretch:
    """Steps up to a block boundary, and how often the very same steps follow each other."""

    pattern: list[int] = field(default_factory=list)
    times: int = 1
    idle: dict[IdleReason, int] = field(default_factory=dict)
    no_work: int = 0


class _Prompt:
    """A prompt and what every step offers it behind its decodes."""

    def __init__(
        self, rule: Rule, length: int, junction: int, decode_tokens: int, decode_requests: int
    ) -> None:
        self.rule, self.length, self.junction = rule, length, junction
        self.tokens = rule.scheduled_budget - decode_tokens
        self.inputs = (
            rule.max_num_batched_tokens - decode_tokens - rule.draft_slots * decode_requests
        )
        self.room = room_tokens(rule, decode_tokens, decode_requests)
        self.threshold = rule.threshold(1 + decode_requests)
        self.most = min(self.room, self.threshold or self.room)

    def stretch(self, start: int) -> _Stretch:
        """The steps from `start` on; none if it gets nothing there."""
        rule, block = self.rule, self.rule.block_size
        stretch = _Stretch()
        reach = self.length - max(1, rule.prefill_lookahead_tokens)
        if start + self.room <= reach:
            reach = min(reach, rule.regular_until(start, self.length, None, self.junction))
        first = start
        while True:
            got = self._step(start, stretch)
            if not got:
                return stretch
            # Past `reach` the rule sees more than the grid, and the prompt may not use the room.
            if start + self.room > reach:
                return stretch
            last, start = start, start + got
            if start % block == 0:
                break
        if first % block == 0:
            stretch.times += max(0, reach - self.room - last) // (start - first)
        return stretch

    def _step(self, start: int, stretch: _Stretch) -> int:
        rule, missing = self.rule, self.length - start
        wanted = min(missing, self.most)
        if wanted <= 0:
            return 0
        split = rule.split(start, wanted, self.length, None, self.junction)
        got = rule.reserve(missing, split)
        if not got:
            return 0
        # The slots are charged for this chunk, and kept for whoever would take what it leaves.
        left = max(0, min(self.tokens - got, self.inputs - got - 2 * rule.draft_slots))
        charge = min(missing - got, left)
        if charge:
            if self.threshold and self.threshold < min(missing, self.room):
                reason: IdleReason = "threshold"
            else:
                reason = cut_reason(rule, start, wanted, split, got, self.length, self.junction)
            stretch.idle[reason] = stretch.idle.get(reason, 0) + charge
        stretch.no_work += left - charge
        stretch.pattern.append(got)
        return got


def _append(runs: list[tuple[tuple[int, ...], int]], pattern: tuple[int, ...], times: int) -> None:
    if runs and runs[-1][0] == pattern:
        times += runs.pop()[1]
    if pattern:
        runs.append((pattern, times))


def _tokens_per_step(rule: Rule, most: int) -> float:
    """Mean chunk over the repeating cycle of an endless prompt that gets `most` tokens a step."""
    start, steps = 0, 0
    seen: dict[int, tuple[int, int]] = {}
    while (offset := start % rule.block_size) not in seen:
        seen[offset] = start, steps
        got = rule.split(start, most, _ENDLESS) if most > 0 else 0
        if got <= 0:
            return 0.0
        start, steps = start + got, steps + 1
    since, before = seen[offset]
    return (start - since) / (steps - before)


def _check(prompt: int, computed: int, decode_tokens: int, decode_requests: int) -> None:
    if prompt < 1:
        raise PlannerError(f"num_prompt_tokens = {prompt} must be at least 1")
    if not 0 <= computed < prompt:
        raise PlannerError(
            f"num_computed_tokens = {computed} must be from 0 to num_prompt_tokens - 1 = "
            f"{prompt - 1}: the last token of a prompt is always computed"
        )
    if decode_tokens < 0:
        raise PlannerError(f"decode_tokens = {decode_tokens} must be at least 0")
    if not 0 <= decode_requests <= decode_tokens or (decode_tokens and not decode_requests):
        raise PlannerError(
            f"decode_requests = {decode_requests} must be from 1 to decode_tokens = "
            f"{decode_tokens}, or 0 where that is 0"
        )
