"""The recommendation: which prefill budget to set, and the price of each alternative.

With measured step costs: the smallest feasible budget whose slowdown is within 3 % of the best.
From the rule alone: keep the budget where nothing would be warned about, else the smallest number
of blocks that schedules more tokens a step than now, never below what the user set; a smaller
budget is offered only from measured cost. The sentences are `advice`'s.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from chunk_planner.candidates import Workload, block_ladder, candidate_budgets
from chunk_planner.diagnosis import Finding, diagnose
from chunk_planner.errors import PlannerError
from chunk_planner.evaluate import Budget, Scored, evaluate
from chunk_planner.rule import Rule
from chunk_planner.score import StepCost

#: A budget this close to the best is on the plateau; the measurement's noise widens it.
PLATEAU = 0.03
#: The prompt budgets are scored on, in tokens, where the user names none.
REFERENCE_PROMPT_TOKENS = 32768
#: vLLM's largest default budget: candidates end here, or at twice the user's budget.
LARGEST_DEFAULT = 16384


class KVLeft(Protocol):
    """KV cache left at one budget, as `chunk_planner.geometry` computes it."""

    kv_tokens: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Constraints:
    """What a budget has to respect.

    Args:
        max_model_len: `--max-model-len`, in tokens.
        kv_left: budget -> KV cache left, None where nothing is known about memory.
        lmcache: LMCache is configured; it works only with budgets in [B, 2B).
        slo_itl_ms: longest step a decode may share, in milliseconds; needs measured cost.
        slo_ttft_s: longest prefill of the reference prompt, in seconds; needs measured cost.
    """

    max_model_len: int | None = None
    kv_left: Callable[[int], KVLeft] | None = None
    lmcache: bool = False
    slo_itl_ms: float | None = None
    slo_ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The answer of `recommend`.

    `findings` say what is wrong with the current budget, `notes` what the reader has to know
    about the choice; both are numbers that `advice` puts into words.
    """

    rule: Rule
    workload: Workload
    current: Budget
    recommended: Budget
    candidates: tuple[Budget, ...]
    evidence: str
    prompt_tokens: int
    max_model_len: int | None = None
    findings: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()

    @property
    def keeps(self) -> bool:
        """Whether the recommendation is to change nothing."""
        return self.recommended.max_num_batched_tokens == self.current.max_num_batched_tokens

    def with_findings(self, more: Sequence[Finding]) -> "Recommendation":
        """This recommendation with findings that only a live engine shows."""
        return replace(self, findings=(*self.findings, *more))

    def to_json(self) -> dict[str, object]:
        """Plain data, without sentences."""
        return {
            "block_size": self.rule.block_size,
            "current": asdict(self.current),
            "recommended": asdict(self.recommended),
            "candidates": [asdict(candidate) for candidate in self.candidates],
            "expected_decodes": self.recommended.decodes,
            "evidence": self.evidence,
            "prompt_tokens": self.prompt_tokens,
        }


def recommend(
    rule: Rule,
    *,
    max_num_seqs: int = 256,
    max_num_active_seqs: int | None = None,
    num_speculative_tokens: int = 0,
    expected_decodes: int | None = None,
    short_prompt_tokens: int | None = None,
    kv_cache_requests: int | None = None,
    prompt_tokens: int | None = None,
    cost: StepCost | None = None,
    constraints: Constraints | None = None,
) -> Recommendation:
    """Recommend a budget for the engine that `rule` describes.

    Args:
        rule: the chunk rule at the user's budget.
        max_num_seqs, max_num_active_seqs, num_speculative_tokens, expected_decodes,
            short_prompt_tokens, kv_cache_requests: see `Workload`.
        prompt_tokens: a typical long prompt, which budgets are scored on.
        cost: measured step costs; without them the answer is rule-only.
        constraints: see `Constraints`.

    Returns:
        Recommendation: `recommended` equals `current` where the budget is to be kept.

    Raises:
        PlannerError: a value out of range, or no budget that meets the constraints.
    """
    workload = Workload(
        max_num_seqs=max_num_seqs,
        max_num_active_seqs=max_num_active_seqs,
        num_speculative_tokens=num_speculative_tokens,
        expected_decodes=expected_decodes,
        short_prompt_tokens=short_prompt_tokens,
        kv_cache_requests=kv_cache_requests,
    )
    limits = constraints or Constraints()
    if cost is None and (limits.slo_itl_ms or limits.slo_ttft_s):
        raise PlannerError(
            "slo_itl_ms and slo_ttft_s need measured step costs; measure them with "
            "'chunk-planner calibrate'"
        )
    prompt = prompt_tokens or min(
        max(REFERENCE_PROMPT_TOKENS, 8 * rule.block_size), limits.max_model_len or 1 << 60
    )
    scored = [evaluate(rule, workload, prompt, cost)]
    for blocks, option in _candidate_rules(rule, workload, limits, cost):
        scored.append(evaluate(option, workload, prompt, cost, blocks=blocks))
    current, *options = _with_slowdowns([_limited(one, limits, rule) for one in scored])
    findings = diagnose(rule, current, workload, lmcache=limits.lmcache)
    if cost is None:
        recommended, notes = _choose_by_rule(current, options, findings, rule.block_size)
    else:
        recommended, notes = _choose_by_cost(current, options, cost, rule.block_size)
    if prompt <= rule.block_size:
        notes.append(Finding("prompts_below_block", {"prompt_tokens": prompt}))
    return Recommendation(
        rule=rule,
        workload=workload,
        current=current,
        recommended=recommended,
        candidates=tuple(options),
        evidence=cost.evidence if cost else "rule",
        prompt_tokens=prompt,
        max_model_len=limits.max_model_len,
        findings=tuple(findings),
        notes=tuple(notes),
    )


def _candidate_rules(
    rule: Rule, workload: Workload, limits: Constraints, cost: StepCost | None
) -> list[tuple[int, Rule]]:
    """`(blocks, rule at that candidate's budget)`, by budget."""
    block, slots = rule.block_size, rule.draft_slots
    if limits.lmcache:
        # The largest budget LMCache takes leaves decodes the most room beside its one block.
        return [(1, rule.with_budget(2 * block - 1))]
    most = max(LARGEST_DEFAULT, 2 * rule.max_num_batched_tokens)
    if cost is not None:
        most = max(cost.max_tokens, 2 * block)
    if limits.max_model_len:
        most = min(most, limits.max_model_len)
    ladder = block_ladder(rule.max_num_batched_tokens // block, block, most)
    budgets = [(n, *candidate_budgets(block, n, workload, slots)) for n in ladder]
    # One block keeps room for every sequence, more keep it for the typical number: with many
    # sequences one block can cost more than two.
    worth = [
        one
        for one, after in zip(budgets, [*budgets[1:], None], strict=True)
        if after is None or one[1] < after[1]
    ]
    # A user who set max_num_scheduled_tokens has to raise both; otherwise it follows.
    both = rule.scheduled_budget != rule.max_num_batched_tokens
    return [
        (n, rule.with_budget(batched, scheduled if both else None))
        for n, batched, scheduled in worth
    ]


def _limited(scored: Scored, limits: Constraints, rule: Rule) -> Scored:
    """`scored` with the first limit it breaks written into it."""
    budget = scored.budget
    tokens = budget.max_num_batched_tokens
    why = budget.infeasible
    kv = limits.kv_left(tokens) if limits.kv_left else None
    if kv is not None:
        budget = replace(budget, kv_tokens=kv.kv_tokens, kv_fits=kv.fits)
        if not kv.fits:
            why = why or f"the KV cache left does not hold {limits.max_model_len} tokens"
    if limits.lmcache and not rule.block_size <= tokens < 2 * rule.block_size:
        why = why or f"LMCache needs {rule.block_size} <= budget < {2 * rule.block_size}"
    over_itl = limits.slo_itl_ms and (budget.mixed_step_ms or 0) > limits.slo_itl_ms
    if over_itl:
        why = why or f"a mixed step takes {budget.mixed_step_ms:.0f} ms"
    if limits.slo_ttft_s and (budget.prompt_s or 0) > limits.slo_ttft_s:
        why = why or f"the prompt takes {budget.prompt_s:.1f} s"
    return replace(scored, budget=replace(budget, infeasible=why))


def _with_slowdowns(scored: Sequence[Scored]) -> list[Budget]:
    """Budgets with their slowdown against the best feasible one, alone and with decodes."""
    feasible = [one for one in scored if one.budget.infeasible is None]
    best_alone = min((s.alone.us_per_token for s in feasible if s.alone), default=None)
    best_mixed = min(
        (s.with_decodes.us_per_token for s in feasible if s.with_decodes), default=None
    )

    def against(best, one):
        return one.us_per_token / best - 1 if best and one else None

    return [
        replace(
            one.budget,
            slowdown=against(best_alone, one.alone),
            slowdown_with_decodes=against(best_mixed, one.with_decodes),
        )
        for one in scored
    ]


def _choose_by_rule(
    current: Budget, options: Sequence[Budget], findings: Sequence[Finding], block_size: int
) -> tuple[Budget, list[Finding]]:
    """The smallest step up, and only if something is wrong that a budget can mend."""
    if current.infeasible is None and not any(one.mended_by_budget for one in findings):
        return current, []
    # Whole blocks beside the decodes have to gain on what a step holds now. Where headroom is all
    # that is missing, the same blocks with headroom will do.
    only_headroom = {one.kind for one in findings} == {"no_headroom"}
    needed = current.blocks * block_size if only_headroom else current.tokens_per_step + 1
    larger = [
        option
        for option in options
        if option.infeasible is None
        and option.max_num_batched_tokens > current.max_num_batched_tokens
        and (option.blocks * block_size >= needed or current.stalled)
    ]
    if larger:
        return min(larger, key=lambda option: option.max_num_batched_tokens), []
    feasible = [option for option in options if option.infeasible is None]
    if current.infeasible is not None and feasible:
        return max(feasible, key=lambda option: option.tokens_per_step), []
    return current, [Finding("no_larger_budget", {})]


def _choose_by_cost(
    current: Budget, options: Sequence[Budget], cost: StepCost, block_size: int
) -> tuple[Budget, list[Finding]]:
    """The smallest budget on the plateau, alone and with decodes."""
    tolerance = max(PLATEAU, cost.noise)
    feasible = [
        one for one in [current, *options] if one.infeasible is None and one.slowdown is not None
    ]
    if not feasible:
        raise PlannerError("no budget meets the constraints; " + _reasons([current, *options]))
    worst = {
        one: math.inf
        if one.stalls_with_decodes
        else max(one.slowdown, one.slowdown_with_decodes or 0)
        for one in feasible
    }
    plateau = [one for one in feasible if worst[one] <= tolerance]
    # With decodes the best budget may differ from the best alone; then the better of both worlds.
    chosen = min(plateau or [min(feasible, key=worst.get)], key=lambda b: b.max_num_batched_tokens)
    notes = []
    widest = max(feasible, key=lambda one: one.tokens_per_step)
    others = [one for one in feasible if one.tokens_per_step < widest.tokens_per_step]
    at_the_end = widest.max_num_batched_tokens + block_size > cost.max_tokens
    if at_the_end and others and min(one.slowdown for one in others) > tolerance:
        notes.append(Finding("still_on_slope", {"tokens": widest.max_num_batched_tokens}))
    return chosen, notes


def _reasons(budgets: Sequence[Budget]) -> str:
    return "; ".join(
        f"{one.max_num_batched_tokens}: {one.infeasible}" for one in budgets if one.infeasible
    )
