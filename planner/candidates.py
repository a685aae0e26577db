"""Which budgets are worth considering: whole blocks, plus room for decodes, plus a lane.

A budget of exactly n blocks is a cliff: one decode token in the step and the chunk loses a whole
block (n >= 2), or prefill stops altogether (n = 1). So a candidate is

    n * B + H + lane,    H = D * (1 + k) + ds * (D + 1)

with B the block size, D decodes sharing the step, k speculative tokens, ds draft slots charged
per scheduled request. Need and need - 1 of the first two terms were checked against vLLM's
scheduler for n = 1, 2 and D = 0, 1, 6, 15 on five releases. The lane is room for a short prompt
beside the blocks: without it, 500-token prompts behind one 230k prefill waited a median of 67
steps at block 1152 and budget 2368, and none at 2820.
"""

from dataclasses import dataclass

from chunk_planner.errors import PlannerError

#: Without better knowledge, no more decodes than this are expected beside a prefill.
TYPICAL_DECODES = 64
#: A short prompt is at most this long unless the user says otherwise (half a block on small grids).
SHORT_PROMPT_TOKENS = 512
#: Budgets are rounded up to this where that stays inside the next block.
ROUND_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Workload:
    """Who shares the scheduler's steps. Counts of requests, except where a name says tokens.

    Args:
        max_num_seqs: `--max-num-seqs`.
        max_num_active_seqs: `--max-num-active-seqs`, None where unset or unknown.
        num_speculative_tokens: k; a decoding request schedules 1 + k tokens a step.
        expected_decodes: D, if the user knows it.
        short_prompt_tokens: the lane, in tokens; None for min(512, B // 2).
        kv_cache_requests: how many one-block requests the KV pool holds, None if unknown.

    Raises:
        PlannerError: a value below its minimum, by name.
    """

    max_num_seqs: int = 256
    max_num_active_seqs: int | None = None
    num_speculative_tokens: int = 0
    expected_decodes: int | None = None
    short_prompt_tokens: int | None = None
    kv_cache_requests: int | None = None

    def __post_init__(self) -> None:
        least = {"max_num_seqs": 1, "max_num_active_seqs": 1}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and value < least.get(name, 0):
                raise PlannerError(f"{name} = {value} must be at least {least.get(name, 0)}")
        if self.expected_decodes is not None and self.expected_decodes > self.most_decodes:
            raise PlannerError(
                f"expected_decodes = {self.expected_decodes} exceeds the {self.most_decodes} "
                "sequences that max_num_seqs lets run at once; raise max_num_seqs or lower it"
            )

    @property
    def most_decodes(self) -> int:
        """The most requests that can decode at once."""
        return min(self.max_num_seqs, self.max_num_active_seqs or self.max_num_seqs)

    def decodes(self, blocks: int) -> int:
        """D for a budget of `blocks` blocks.

        At one block a shortfall of headroom stops prefill (observed: budget 1168, block 1152, 17
        decodes, no prefill token in 400 steps), so every sequence counts; above it costs a block.
        """
        if blocks <= 1:
            return self.most_decodes
        if self.expected_decodes is not None:
            return self.expected_decodes
        pool = self.most_decodes if self.kv_cache_requests is None else self.kv_cache_requests
        return min(self.most_decodes, pool, TYPICAL_DECODES)

    def lane(self, block_size: int) -> int:
        """Tokens kept beside the blocks for a short prompt.

        Raises:
            PlannerError: a prompt that is not shorter than a block.
        """
        if self.short_prompt_tokens is not None:
            if self.short_prompt_tokens >= block_size:
                raise PlannerError(
                    f"short_prompt_tokens = {self.short_prompt_tokens} must be below the block of "
                    f"{block_size} tokens: a long prompt takes every whole block that is left"
                )
            return self.short_prompt_tokens
        return min(SHORT_PROMPT_TOKENS, block_size // 2)

    def decode_tokens(self, decodes: int) -> int:
        """Tokens that `decodes` decoding requests schedule in one step."""
        return decodes * (1 + self.num_speculative_tokens)


def headroom_tokens(workload: Workload, decodes: int, draft_slots: int) -> int:
    """H: what the decodes, and every scheduled request's draft slots, take from the budget."""
    return workload.decode_tokens(decodes) + draft_slots * (decodes + 1)


def _round_up(tokens: int, below: int) -> int:
    rounded = -(-tokens // ROUND_TOKENS) * ROUND_TOKENS
    return rounded if rounded < below else tokens


def candidate_budgets(
    block_size: int, blocks: int, workload: Workload, draft_slots: int
) -> tuple[int, int]:
    """`(max_num_batched_tokens, max_num_scheduled_tokens)` that keep `blocks` blocks a step.

    The two differ by the draft slots, which only the first is charged for.
    """
    decodes = workload.decodes(blocks)
    base = blocks * block_size + workload.lane(block_size)
    below = (blocks + 1) * block_size
    batched = _round_up(base + headroom_tokens(workload, decodes, draft_slots), below)
    scheduled = _round_up(base + workload.decode_tokens(decodes), below)
    return batched, min(scheduled, batched)


def second_prefill(
    block_size: int, blocks: int, workload: Workload, draft_slots: int
) -> tuple[int, int]:
    """`(long_prefill_token_threshold, max_num_batched_tokens)` that let a second long prompt in.

    The first one takes every whole block it can, whatever the budget; only a cap of n blocks with
    room for n + 1 leaves one to the next in line.
    """
    decodes = workload.decodes(blocks + 1)
    # Two prefills share the step, so the draft slots are charged once more.
    headroom = headroom_tokens(workload, decodes, draft_slots) + draft_slots
    below = (blocks + 2) * block_size
    return blocks * block_size, _round_up((blocks + 1) * block_size + headroom, below)


def is_candidate(budget: int, block_size: int, workload: Workload, draft_slots: int) -> bool:
    """Whether a recommendation for this engine may have named `budget`.

    What was recommended never warns again. D follows the KV pool, which shrinks when the budget
    grows, so from two blocks up every D from today's to the largest that could have been used
    is accepted.
    """
    # At one block D, and with it what lies beside the blocks, is the largest.
    beside = workload.lane(block_size) + ROUND_TOKENS
    beside += headroom_tokens(workload, workload.decodes(1), draft_slots)
    for blocks in range(max(1, (budget - beside) // block_size), budget // block_size + 1):
        if candidate_budgets(block_size, blocks, workload, draft_slots)[0] == budget:
            return True
    blocks = budget // block_size
    if blocks < 2:
        return False
    spare = budget - blocks * block_size - workload.lane(block_size)
    least = headroom_tokens(workload, workload.decodes(blocks), draft_slots)
    known = workload.expected_decodes is not None
    most = workload.decodes(blocks) if known else min(workload.most_decodes, TYPICAL_DECODES)
    return least <= spare < headroom_tokens(workload, most, draft_slots) + ROUND_TOKENS


def block_ladder(current_blocks: int, block_size: int, most_tokens: int) -> list[int]:
    """Numbers of blocks to look at: 1, 2, 3, 4, then three rungs a doubling, up to `most_tokens`.

    `current_blocks` and the one after it are always on it, the latter because it is the smallest
    step up from where the user stands.
    """
    rungs = {1, 2, max(1, current_blocks), current_blocks + 1}
    blocks = 1
    while blocks * block_size <= most_tokens:
        rungs.add(blocks)
        blocks = blocks + 1 if blocks < 4 else max(blocks + 1, round(blocks * 1.26))
    return sorted(rungs)
