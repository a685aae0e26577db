"""Budgets side by side: what each schedules, and its price."""

from collections.abc import Callable

from chunk_planner import advice
from chunk_planner.cli.render import print_table
from chunk_planner.evaluate import Budget
from chunk_planner.recommendation import Recommendation


def print_candidates(found: Recommendation) -> None:
    """One row a budget, the current one and the recommended one marked.

    Columns whose values nothing supplied (no measured cost, no memory size) are left out.
    """
    shown = {one.max_num_batched_tokens: one for one in (*found.candidates, found.current)}
    budgets = [shown[tokens] for tokens in sorted(shown)]
    columns = [
        ("", lambda one: _mark(found, one)),
        ("budget", lambda one: one.max_num_batched_tokens),
        ("blocks", lambda one: one.blocks),
        ("tokens/step", lambda one: advice.tokens(one.tokens_per_step)),
        ("idle alone", lambda one: advice.percent(one.idle_share)),
        ("D", lambda one: one.decodes),
        ("idle with D", lambda one: advice.percent(one.idle_share_with_decodes)),
        ("slowdown", lambda one: _number(one.slowdown, lambda share: f"{1 + share:.2f}x")),
        ("mixed step (ms)", lambda one: _number(one.mixed_step_ms, "{:.1f}".format)),
        ("prompt (s)", lambda one: _number(one.prompt_s, "{:.2f}".format)),
        ("short prompt waits (steps)", lambda one: one.short_prompt_wait_steps),
        ("checkpoint every (tokens)", lambda one: one.checkpoint_spacing_tokens),
        ("KV left (tokens)", lambda one: one.kv_tokens),
        ("cannot", lambda one: one.infeasible),
    ]
    columns = [(name, get) for name, get in columns if any(get(one) is not None for one in budgets)]
    print_table(
        [name for name, _ in columns],
        [["" if get(one) is None else get(one) for _, get in columns] for one in budgets],
        title=f"block {found.rule.block_size} tokens, evidence: {found.evidence}",
        key=2,
    )


def _number(value: float | None, text: Callable[[float], str]) -> str | None:
    return None if value is None else text(value)


def _mark(found: Recommendation, budget: Budget) -> str:
    now = budget.max_num_batched_tokens == found.current.max_num_batched_tokens
    best = budget.max_num_batched_tokens == found.recommended.max_num_batched_tokens
    if best:
        return "keep" if now else "set"
    return "now" if now else ""
