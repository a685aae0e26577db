"""Why a prompt makes no progress, and what would let it."""

from dataclasses import dataclass
from typing import Literal

from chunk_planner.rule import Rule

StallReason = Literal[
    "no_headroom",  # the decodes leave less than a chunk needs; it moves when they end
    "draft_slots",  # the draft slots alone do; it never moves
    "lookahead_reserve",  # a boundary lies inside the lookahead before the prompt's end
    "rule",  # a rule of the engine's own that gives it nothing
]


@dataclass(frozen=True, slots=True)
class Stall:
    """A prompt that no step moves: `reason` for programs, `text` (one sentence) for people."""

    reason: StallReason
    text: str

    @property
    def for_good(self) -> bool:
        """Whether it stays so when nothing else runs."""
        return self.reason != "no_headroom"


def room_tokens(rule: Rule, decode_tokens: int = 0, decode_requests: int = 0) -> int:
    """Tokens that both budgets leave one prefill behind these decodes; below 1, none."""
    slots = rule.draft_slots
    return min(
        rule.scheduled_budget - decode_tokens,
        rule.max_num_batched_tokens - decode_tokens - slots * (decode_requests + 1),
    )


def find_stall(
    rule: Rule,
    start: int,
    num_prompt_tokens: int,
    shared_prefix_boundary: int = 0,
    room: int | None = None,
) -> Stall:
    """Why a prefill that stands at `start` and got nothing got nothing.

    `room` is what the decodes ahead of it left, None where nothing else was scheduled.
    """
    alone, block = room_tokens(rule), rule.block_size
    missing = num_prompt_tokens - start
    wanted = min(missing, alone, rule.threshold(1) or alone)
    split = 0
    if wanted > 0:
        split = rule.split(start, wanted, num_prompt_tokens, None, shared_prefix_boundary)
    moves_alone = rule.reserve(missing, split) > 0
    if room is not None and moves_alone:
        # A block wider than any chunk is crossed in parts of any size.
        part = rule.split(start, 1, num_prompt_tokens, None, shared_prefix_boundary)
        return Stall(
            "no_headroom",
            f"no prefill while these decodes run: they leave {max(room, 0)} of "
            f"{min(rule.scheduled_budget, rule.max_num_batched_tokens)} tokens a step and the next "
            f"chunk needs {rule.reserve(missing, part) or min(missing, block - start % block)}",
        )
    if split and not moves_alone:
        return Stall(
            "lookahead_reserve",
            f"the prompt never finishes: its next chunk would end {missing - split} tokens before "
            f"the end, and must leave none or at least {rule.prefill_lookahead_tokens} for the "
            "drafter to read ahead",
        )
    if not split and alone < min(block, rule.scheduled_budget):
        return Stall(
            "draft_slots",
            f"no prompt of a block or more ever starts: draft_slots = {rule.draft_slots} leaves "
            f"{max(alone, 0)} of max_num_batched_tokens = {rule.max_num_batched_tokens}, less than "
            f"the block of {block}; set at least {block + rule.draft_slots}",
        )
    return Stall("rule", f"the scheduler gives this prompt nothing at token {start}")
