"""The recommendation: which prefill budget to set, and the price of each alternative.

With measured step costs: the smallest feasible budget whose slowdown is within 3 % of the best.
From the rule alone: keep the budget where nothing would be warned about, else the smallest number
of blocks that schedules more tokens a step than now, never below what the user set; a smaller
budget is offered only from measured cost. The sentences are `advice`'s.
"""

from collections.abc import Sequence
from dataclasses import replace

from chunk_planner.candidates import Workload, block_ladder, candidate_budgets
from chunk_planner.choice import choose_by_cost, choose_by_rule
from chunk_planner.diagnosis import Finding, diagnose
from chunk_planner.errors import PlannerError
from chunk_planner.evaluate import Budget, Scored, evaluate
from chunk_planner.recommendation import Constraints, Recommendation
from chunk_planner.rule import Rule
from chunk_planner.score import StepCost

#: The prompt budgets are scored on, in tokens, where the user names none.
REFERENCE_PROMPT_TOKENS = 32768
#: vLLM's largest default budget: candidates end here, or at twice the user's budget.
LARGEST_DEFAULT = 16384


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
    checkpoint_us: float | None = None,
    constraints: Constraints | None = None,
) -> Recommendation:
    """Recommend a budget for the engine that `rule` describes.

    Args:
        rule: the chunk rule at the user's budget.
        max_num_seqs, max_num_active_seqs, num_speculative_tokens, expected_decodes,
            short_prompt_tokens, kv_cache_requests: see `Workload`.
        prompt_tokens: a typical long prompt, which budgets are scored on.
        cost: measured step costs; without them the answer is rule-only.
        checkpoint_us: price of one state checkpoint, shown beside; it never chooses a budget.
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
    prompt = _reference_prompt(rule, limits, cost) if prompt_tokens is None else prompt_tokens
    scored = [evaluate(rule, workload, prompt, cost)]
    for blocks, option in _candidate_rules(rule, workload, limits, cost):
        scored.append(evaluate(option, workload, prompt, cost, blocks=blocks))
    current, *options = _with_slowdowns([_limited(one, limits, rule) for one in scored])
    uncertainty = cost.uncertainty if cost else 0.0
    findings = diagnose(
        rule,
        current,
        workload,
        lmcache=limits.lmcache,
        uncertainty=uncertainty,
        longest_prompt=prompt if prompt <= rule.block_size else limits.max_model_len,
    )
    if cost is None:
        recommended, notes = choose_by_rule(current, options, findings, rule.block_size)
    else:
        recommended, notes = choose_by_cost(current, options, cost, rule.block_size)
    if prompt <= rule.block_size:
        notes.append(Finding("prompts_below_block", {"prompt_tokens": prompt}))
    elif limits.max_model_len and limits.max_model_len <= rule.scheduled_budget:
        notes.append(Finding("prompts_fit_a_step", {"max_model_len": limits.max_model_len}))
    return Recommendation(
        rule=rule,
        workload=workload,
        current=current,
        recommended=recommended,
        candidates=tuple(options),
        evidence=cost.evidence if cost else "rule",
        prompt_tokens=prompt,
        max_model_len=limits.max_model_len,
        lmcache=limits.lmcache,
        checkpoint_us=checkpoint_us,
        findings=tuple(findings),
        notes=tuple(notes),
    )


def _reference_prompt(rule: Rule, limits: Constraints, cost: StepCost | None) -> int:
    """A long prompt that the engine takes and the measurement reaches."""
    bounds = [max(REFERENCE_PROMPT_TOKENS, 8 * rule.block_size)]
    if limits.max_model_len:
        bounds.append(limits.max_model_len)
    if cost is not None:
        bounds.append(cost.max_context_tokens)
    return min(bounds)


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
    if limits.slo_itl_ms:
        if budget.mixed_step_ms is None:
            why = why or "its step with decodes was not measured"
        elif budget.mixed_step_ms > limits.slo_itl_ms:
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
