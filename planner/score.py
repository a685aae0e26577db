"""What a budget costs: predicted time per prefill token, from measured step costs.

The score of a budget is its slowdown, the predicted time per prefill token over that of the best
feasible one. The idle share is not a score: a dense 27B served the same throughput from 528 to
8448 tokens a step, a 35B mixture of experts four times more at the upper end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from chunk_planner.plan import ChunkPlan


class StepCost(Protocol):
    """Step times of one engine on one device, as `chunk_planner.cost` fits them from a table."""

    #: where the times come from, for example "measured-engine"
    evidence: str
    #: smallest and largest step that was measured, in scheduled tokens
    min_tokens: int
    max_tokens: int
    #: longest context that was measured, in tokens
    max_context_tokens: int
    #: relative difference below which two predicted times are the same, 0.02 = 2 %
    uncertainty: float

    def step_us(
        self, prefill: Sequence[tuple[int, int]] = (), decode_kv: Sequence[int] = ()
    ) -> float:
        """Microseconds of one step; see `chunk_planner.cost`. Raises PlannerError out of range."""
        ...


@dataclass(frozen=True, slots=True)
class Score:
    """Predicted cost of prefilling one prompt in the steps of a plan."""

    us_per_token: float
    #: the longest of these steps, which is what a decode sharing it waits for, in milliseconds
    longest_step_ms: float
    #: from the first step to the last, in seconds
    prompt_s: float


def score(
    plan: ChunkPlan, cost: StepCost, *, decodes: int = 0, num_speculative_tokens: int = 0
) -> Score | None:
    """Price every step of `plan`, with `decodes` requests decoding beside it.

    Each decode reads a KV cache as long as the prompt. With k speculative tokens a decode is a
    query of 1 + k tokens, which the step cost prices like a short prefill.

    Returns:
        None if the plan makes no progress.

    Raises:
        PlannerError: a step outside the measured range.
    """
    if plan.stalled or not plan.chunks:
        return None
    prompt = sum(plan.chunks)
    beside = [(1 + num_speculative_tokens, prompt)] * decodes if num_speculative_tokens else []
    decode_kv = [] if num_speculative_tokens else [prompt] * decodes
    start = plan.num_computed_tokens
    total = longest = 0.0
    for tokens in plan.chunks:
        step = cost.step_us(prefill=[(tokens, start), *beside], decode_kv=decode_kv)
        total += step
        longest = max(longest, step)
        start += tokens
    return Score(total / prompt, longest / 1e3, total / 1e6)
