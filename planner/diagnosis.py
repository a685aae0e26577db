"""What is wrong with a budget, as findings with numbers; `advice` puts them into words.

Two lines decide when a loss is worth a warning: measured, a slowdown above 5 %; from the rule
alone, an idle share above 25 %, unless the budget is one that a recommendation may have named.
"""

from dataclasses import dataclass, field

from chunk_planner.candidates import Workload, is_candidate
from chunk_planner.evaluate import Budget
from chunk_planner.rule import Rule

SLOWDOWN_LINE = 0.05
IDLE_LINE = 0.25

#: Findings that another budget removes; the others need another flag or only need saying.
_MENDED_BY_BUDGET = frozenset(
    {"idle", "saw_tooth", "slowdown", "no_headroom", "stalled", "lmcache"}
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth telling. `values` are the numbers its sentence needs."""

    kind: str
    values: dict[str, object] = field(default_factory=dict)

    @property
    def mended_by_budget(self) -> bool:
        return self.kind in _MENDED_BY_BUDGET


def diagnose(
    rule: Rule,
    budget: Budget,
    workload: Workload,
    *,
    lmcache: bool = False,
    uncertainty: float = 0.0,
    longest_prompt: int | None = None,
) -> list[Finding]:
    """Findings about `budget`, the rule's own, most serious first; empty where all is well.

    A slowdown inside the measurement's `uncertainty` is none. Where `longest_prompt` (tokens) is no
    longer than a block or a step, the block grid costs no prompt more than its last stop.
    """
    found = []
    block = rule.block_size
    if budget.stalled:
        found.append(Finding("stalled", {"why": budget.stalled}))
    # Measured advice is kept because it is on the plateau; rule-only advice has to be recognised.
    known = is_candidate(budget.max_num_batched_tokens, block, workload, rule.draft_slots)
    # the most room beside its one block that LMCache allows
    known = known or (lmcache and budget.max_num_batched_tokens == 2 * block - 1)
    if lmcache and not block <= budget.max_num_batched_tokens < 2 * block:
        found.append(Finding("lmcache", {"least": block, "most": 2 * block - 1}))
    if budget.blocks == 1 and budget.stalls_with_decodes and not known:
        found.append(Finding("no_headroom", {"above": budget.stalls_above_decodes}))
    if lmcache:
        # The budget stays below 2B whatever it idles.
        return found
    if budget.slowdown is not None:
        if budget.slowdown > max(SLOWDOWN_LINE, uncertainty):
            found.append(Finding("slowdown", {"slowdown": budget.slowdown}))
    elif budget.idle_share > IDLE_LINE and not known and not _asked_for(rule):
        short = longest_prompt is not None and longest_prompt <= max(block, rule.scheduled_budget)
        # What never moves has no share of the budget to tell about.
        if budget.tokens_per_step and not short:
            found.append(Finding(_waste(rule, budget), {}))
    return found


def _waste(rule: Rule, budget: Budget) -> str:
    """The kind of finding that an idle share above the line is."""
    if 0 < rule.threshold(1) < rule.block_size:
        return "small_threshold"
    return "idle" if budget.blocks else "saw_tooth"


def _asked_for(rule: Rule) -> bool:
    """Whether the user capped chunks with `--long-prefill-token-threshold`.

    From 0.31 on a lone request ignores the cap, so there it explains nothing.
    """
    capped = rule.long_prefill_token_threshold >= rule.block_size
    return capped and not rule.release.lone_request_ignores_threshold
