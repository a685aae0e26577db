"""What a recommendation is asked to respect, and what it answers."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from chunk_planner.candidates import Workload
from chunk_planner.diagnosis import Finding
from chunk_planner.errors import PlannerError
from chunk_planner.evaluate import Budget
from chunk_planner.rule import Rule


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

    Raises:
        PlannerError: a limit that is not above 0, by name.
    """

    max_model_len: int | None = None
    kv_left: Callable[[int], KVLeft] | None = None
    lmcache: bool = False
    slo_itl_ms: float | None = None
    slo_ttft_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_model_len", "slo_itl_ms", "slo_ttft_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # NaN included
                raise PlannerError(f"{name} = {value} must be above 0")


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
    #: LMCache takes only budgets in [B, 2B)
    lmcache: bool = False
    #: storing one request's state at a chunk end, from a `measured-kernel` table
    checkpoint_us: float | None = None
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
            "checkpoint_us": self.checkpoint_us,
        }
