"""One budget, evaluated: what it schedules, what it leaves, and what that costs if measured."""

from dataclasses import dataclass, field

from chunk_planner.candidates import Workload, headroom_tokens, second_prefill
from chunk_planner.errors import PlannerError
from chunk_planner.plan import ChunkPlan, plan_prefill
from chunk_planner.rule import Rule
from chunk_planner.score import Score, StepCost, score


@dataclass(frozen=True, slots=True)
class Budget:
    """One budget and what it brings. Shares and slowdowns are fractions, sizes are tokens."""

    max_num_batched_tokens: int
    max_num_scheduled_tokens: int
    #: whole blocks in a step: beside the expected decodes for a candidate, else for a prompt that
    #: is alone; 0 where a block is larger than the budget
    blocks: int
    tokens_per_step: float
    idle_share: float
    idle_share_with_decodes: float
    #: room beside the blocks: first for decodes and draft slots, then for a short prompt
    headroom_tokens: int
    lane_tokens: int
    #: D, the decodes that the shares and prices "with decodes" assume
    decodes: int
    #: more decoding requests than this stop prefill; None where prefill goes on in sub-blocks
    stalls_above_decodes: int | None
    #: why some prompt makes no progress even alone, None where all do
    stalled: str | None
    #: distance between cached recurrent states, the price of a larger chunk in prefix reuse
    checkpoint_spacing_tokens: int
    #: `--long-prefill-token-threshold` and the budget that let a second long prompt in
    second_prefill: dict[str, int] = field(hash=False)
    #: steps a lane-sized prompt waits behind one long prompt and the decodes
    short_prompt_wait_steps: int
    #: predicted time per prefill token over the best feasible budget's, minus 1
    slowdown: float | None = None
    slowdown_with_decodes: float | None = None
    #: the longest step a decode shares with the prefill
    mixed_step_ms: float | None = None
    #: prefill of the reference prompt, alone
    prompt_s: float | None = None
    #: KV cache left, and whether it holds a request of `max_model_len`
    kv_tokens: int | None = None
    kv_fits: bool | None = None
    #: why this budget cannot be recommended
    infeasible: str | None = None

    @property
    def stalls_with_decodes(self) -> bool:
        """Whether the expected decodes alone stop prefill."""
        return self.stalls_above_decodes is not None and self.stalls_above_decodes < self.decodes


@dataclass(frozen=True, slots=True)
class Scored:
    """A budget with its measured scores, None where nothing was measured or nothing moves."""

    budget: Budget
    alone: Score | None
    with_decodes: Score | None


def evaluate(
    rule: Rule,
    workload: Workload,
    prompt_tokens: int,
    cost: StepCost | None = None,
    *,
    blocks: int | None = None,
) -> Scored:
    """Plan `prompt_tokens` at the rule's budget, alone and beside the expected decodes.

    `blocks` is what the budget was made for, None for a budget that was made for nothing.
    A step outside the measured range makes the budget infeasible, with the reason in it.
    """
    k, slots, block = workload.num_speculative_tokens, rule.draft_slots, rule.block_size
    room = min(rule.scheduled_budget, rule.max_num_batched_tokens - slots)
    blocks = room // block if blocks is None else blocks
    decodes = workload.decodes(blocks)
    alone = plan_prefill(rule, prompt_tokens)
    mixed = plan_prefill(
        rule,
        prompt_tokens,
        decode_tokens=workload.decode_tokens(decodes),
        decode_requests=decodes,
    )
    spare = room + slots - blocks * block if blocks else 0
    headroom = min(spare, headroom_tokens(workload, decodes, slots))
    lane = min(spare - headroom, workload.lane(block))
    stalls_above = None
    if blocks:
        stalls_above = min(
            (rule.scheduled_budget - block) // (1 + k),
            (rule.max_num_batched_tokens - slots - block) // (1 + k + slots),
        )
    stalled = alone.stalled or _hang(rule)
    alone_score, outside = _score(alone, cost)
    # A mixed step that was not measured leaves a price unknown, it does not rule the budget out.
    mixed_score, _ = _score(mixed, cost, decodes=decodes, num_speculative_tokens=k)
    return Scored(
        Budget(
            max_num_batched_tokens=rule.max_num_batched_tokens,
            max_num_scheduled_tokens=rule.scheduled_budget,
            blocks=blocks,
            tokens_per_step=alone.tokens_per_step,
            idle_share=alone.idle_share,
            idle_share_with_decodes=mixed.idle_share_with_decodes,
            headroom_tokens=headroom,
            lane_tokens=lane,
            decodes=decodes,
            stalls_above_decodes=stalls_above,
            stalled=stalled,
            checkpoint_spacing_tokens=max(blocks, 1) * block,
            second_prefill=_second_prefill(rule, blocks, workload),
            short_prompt_wait_steps=0 if workload.lane(block) <= lane else mixed.steps,
            mixed_step_ms=mixed_score.longest_step_ms if mixed_score else None,
            prompt_s=alone_score.prompt_s if alone_score else None,
            infeasible=stalled or outside,
        ),
        alone_score,
        mixed_score,
    )


def _second_prefill(rule: Rule, blocks: int, workload: Workload) -> dict[str, int]:
    threshold, budget = second_prefill(rule.block_size, max(blocks, 1), workload, rule.draft_slots)
    return {"long_prefill_token_threshold": threshold, "max_num_batched_tokens": budget}


def _hang(rule: Rule) -> str | None:
    """Why some prompts never finish under multi-module MTP, None if all do.

    Whether the lookahead reserve meets a boundary stop depends on the prompt's length modulo the
    block; lengths that leave fewer tokens than the drafter reads ahead are the ones that can.
    """
    base = 4 * rule.block_size
    for rest in range(1, rule.prefill_lookahead_tokens):
        if text := plan_prefill(rule, base + rest).stalled:
            return f"a prompt of {base + rest} tokens: {text}"
    return None


def _score(
    plan: ChunkPlan, cost: StepCost | None, **beside: int
) -> tuple[Score | None, str | None]:
    """The score, and why there is none where a step lies outside the measured range."""
    if cost is None:
        return None, None
    try:
        return score(plan, cost, **beside), None
    except PlannerError as error:
        return None, str(error)
