"""Which of the evaluated budgets to set: from the rule alone, or from measured cost."""

import math
from collections.abc import Sequence

from chunk_planner.diagnosis import Finding
from chunk_planner.errors import PlannerError
from chunk_planner.evaluate import Budget
from chunk_planner.score import StepCost

#: A budget this close to the best is on the plateau; the measurement's uncertainty widens it.
PLATEAU = 0.03


def choose_by_rule(
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


def choose_by_cost(
    current: Budget, options: Sequence[Budget], cost: StepCost, block_size: int
) -> tuple[Budget, list[Finding]]:
    """The smallest budget on the plateau, alone and with decodes."""
    tolerance = max(PLATEAU, cost.uncertainty)
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
