"""Step cost: what one scheduler step takes on a measured device, fitted from whole steps.

A step that schedules N tokens costs, in microseconds,

    t = g(N) + a * sum over prefills n * (kv + (n + 1) / 2) + b * sum over decodes kv
        + p * prefills + d * decodes

with kv the tokens a request had computed before the step. g is a monotone piecewise-linear curve
through the measured sizes, so floors, knees and tiles show themselves and no shape is assumed.
Attention of a prefill is compute (a), of a decode it reads the cache (b): two coefficients.
The price of a state checkpoint is not in here: every chunk but the last writes one, so it cannot
be told from the constant; it is measured by kernels and shown apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from chunk_planner.errors import PlannerError

#: Two budgets closer than this are equal even where points agreed better (see `StepCost.plateau`).
SMALLEST_DIFFERENCE = 0.01


@dataclass(frozen=True, slots=True)
class Point:
    """One measured step: who was in it, and its time over `repeats` repeats in microseconds."""

    #: (scheduled tokens, tokens computed before) of each prefill
    prefill: tuple[tuple[int, int], ...]
    #: tokens computed before the step, of each decode
    decode_kv: tuple[int, ...]
    p20_us: float
    p50_us: float
    p80_us: float
    repeats: int

    @property
    def tokens(self) -> int:
        """Scheduled tokens of the step."""
        return sum(n for n, _ in self.prefill) + len(self.decode_kv)

    @property
    def context(self) -> int:
        """Longest context in the step, after it, in tokens."""
        return max([n + kv for n, kv in self.prefill] + [kv + 1 for kv in self.decode_kv])


@dataclass(frozen=True, slots=True)
class Plateau:
    """Where larger steps stop paying: sizes in tokens, times in us per token without history."""

    #: smallest measured step whose time per token is the best one's within `uncertainty`
    knee_tokens: int
    knee_us_per_token: float
    best_tokens: int
    best_us_per_token: float
    uncertainty: float
    #: the best is the largest size measured and still gains: the curve ends on the slope
    open_ended: bool


@dataclass(frozen=True, slots=True)
class StepCost:
    """Step times of one engine on one device; see the module for the formula.

    Args:
        knots_tokens, knots_us: g, at increasing step sizes.
        prefill_pair_us: a, per query-key pair.
        decode_kv_us: b, per token of KV cache read.
        prefill_request_us, decode_request_us: p and d.
        max_context_tokens: longest context measured; longer ones are refused.
        noise: relative spread of repeats, median over points of (p50 - p20) / p20.
        error_median, error_p90: leave-one-out relative error of the fit.
        evidence: where the times come from.
        measure_with: the command that would measure what is missing.
    """

    knots_tokens: tuple[int, ...]
    knots_us: tuple[float, ...]
    prefill_pair_us: float
    decode_kv_us: float
    prefill_request_us: float
    decode_request_us: float
    max_context_tokens: int
    noise: float
    error_median: float
    error_p90: float
    evidence: str = "measured-engine"
    measure_with: str = "chunk-planner calibrate"

    @property
    def uncertainty(self) -> float:
        """Relative difference below which two predicted times are the same, 0.02 = 2 %.

        Either bound alone is too wide: single repeats spread more than a p20 of many does, and
        the leave-one-out error also holds what the formula misses. An engine whose repeats spread
        by 5.8 % and whose points agreed within 1.9 % was advised, by the spread, a budget 5 %
        slower than predicted for the best, and measured 6.7 % slower [5.0, 10.6].
        """
        return min(self.noise, self.error_median)

    @property
    def min_tokens(self) -> int:
        """Smallest step measured, in scheduled tokens."""
        return self.knots_tokens[0]

    @property
    def max_tokens(self) -> int:
        """Largest step measured, in scheduled tokens."""
        return self.knots_tokens[-1]

    def step_us(
        self, prefill: Sequence[tuple[int, int]] = (), decode_kv: Sequence[int] = ()
    ) -> float:
        """Microseconds of one step.

        Args:
            prefill: (scheduled tokens, tokens computed before) of each prefill in the step.
            decode_kv: tokens computed before the step, of each decode (one token scheduled each).

        Raises:
            PlannerError: nothing scheduled, or a size or context outside the measured range.
        """
        tokens = sum(n for n, _ in prefill) + len(decode_kv)
        if not self.min_tokens <= tokens <= self.max_tokens:
            raise PlannerError(
                f"a step of {tokens} tokens was not measured (steps of {self.min_tokens} to "
                f"{self.max_tokens} were); measure it with '{self.measure_with} "
                f"--max-num-batched-tokens {max(tokens, self.max_tokens)}'"
            )
        pairs = 0.0
        context = max(decode_kv, default=0)
        for n, kv in prefill:
            pairs += n * (kv + (n + 1) / 2)
            context = max(context, kv + n)
        if context > self.max_context_tokens:
            raise PlannerError(
                f"a context of {context} tokens was not measured (up to {self.max_context_tokens} "
                f"were); measure it with '{self.measure_with} --context-tokens {context}'"
            )
        return (
            _interpolate(self.knots_tokens, self.knots_us, tokens)
            + self.prefill_pair_us * pairs
            + self.decode_kv_us * sum(decode_kv)
            + self.prefill_request_us * len(prefill)
            + self.decode_request_us * len(decode_kv)
        )

    def plateau(self) -> Plateau:
        """Where larger prefill steps stop paying; a difference inside the uncertainty
        is a tie."""
        per_token = {n: self.step_us([(n, 0)]) / n for n in self.knots_tokens}
        best = min(per_token, key=per_token.__getitem__)
        tie = max(self.uncertainty, SMALLEST_DIFFERENCE)
        knee = min(n for n in per_token if per_token[n] <= per_token[best] * (1 + tie))
        return Plateau(
            knee_tokens=knee,
            knee_us_per_token=per_token[knee],
            best_tokens=best,
            best_us_per_token=per_token[best],
            uncertainty=tie,
            open_ended=knee == self.knots_tokens[-1] and len(per_token) > 1,
        )


def _interpolate(xs: Sequence[int], ys: Sequence[float], x: int) -> float:
    from bisect import bisect_right

    i = bisect_right(xs, x)
    if i == len(xs):
        return ys[-1]
    x0, x1, y0, y1 = xs[i - 1], xs[i], ys[i - 1], ys[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
