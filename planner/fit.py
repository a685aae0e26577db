"""Fitting step costs to measured points: non-negative, robust, on relative error.

Needs scipy (the `engine` and `test` extras); evaluating a fitted cost does not.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from chunk_planner.cost import Point, StepCost
from chunk_planner.errors import PlannerError

#: Neighbouring knots of g are at least this factor apart: closer ones would fit the noise.
KNOT_RATIO = 1.12
#: Residuals beyond this many times the median one lose weight (Huber), so that a step another
#: process disturbed in every repeat does not bend the curve.
HUBER = 2.5
#: Repeats from which on a point's p20 and p50 say something about noise.
FEWEST_REPEATS = 3
#: Errors beyond this are as good as any: in an interrupted first round, steps that compiled kernels
#: for a minute stand beside steps of milliseconds. It is what a table takes.
LARGEST_ERROR = 1000.0
#: Points left out one at a time for the error estimate; more would only cost time.
LEFT_OUT = 80


def aggregate(steps: Iterable[tuple[tuple, tuple, float]]) -> list[Point]:
    """Points from single steps (prefill, decode_kv, us), one per composition, sorted by size.

    The order of the requests in a step does not matter, and neither do a few tokens of decode
    context: steps that decode along one after another are one composition while their contexts
    agree to within 64 tokens.
    """
    times: dict[tuple, list[float]] = defaultdict(list)
    first: dict[tuple, tuple] = {}
    for prefill, decode_kv, us in steps:
        key = (tuple(sorted(prefill)), tuple(sorted(kv // 64 for kv in decode_kv)))
        first.setdefault(key, (key[0], tuple(sorted(decode_kv))))
        times[key].append(us)
    points = []
    for key, values in times.items():
        p20, p50, p80 = np.quantile(values, (0.2, 0.5, 0.8)).tolist()
        points.append(Point(*first[key], p20, p50, p80, len(values)))
    return sorted(points, key=order)


def order(point: Point) -> tuple:
    """The order points have in a table: by size, then by who is in them."""
    return point.tokens, point.prefill, point.decode_kv


def fit(points: Sequence[Point], measure_with: str = "chunk-planner calibrate") -> StepCost:
    """Fit a `StepCost` to the p20 times of `points`; its errors are leave-one-out.

    Raises:
        PlannerError: fewer than two step sizes.
    """
    if len({point.tokens for point in points}) < 2:
        raise PlannerError(
            f"{len(points)} measured steps do not make a cost curve; it takes two step sizes"
        )
    knots = _knots(points)
    design, times = _design(points, knots), np.array([point.p20_us for point in points])
    cost = _cost(_solve(design, times), knots, points, measure_with)
    errors = np.minimum(np.abs(_left_out_errors(design, times, len(knots))), LARGEST_ERROR)
    spreads = [(p.p50_us - p.p20_us) / p.p20_us for p in points if p.repeats >= FEWEST_REPEATS]
    error_median = float(np.quantile(errors, 0.5))
    return replace(
        cost,
        # where nothing was repeated, how well points agree with one another is all there is
        noise=median(spreads) if spreads else error_median,
        error_median=error_median,
        error_p90=float(np.quantile(errors, 0.9)),
    )


def _knots(points: Sequence[Point]) -> list[int]:
    """Step sizes g bends at: those of prefills alone first, as they carry the curve."""
    sizes = sorted({point.tokens for point in points})
    alone = {point.tokens for point in points if len(point.prefill) == 1 and not point.decode_kv}
    knots = [sizes[0], sizes[-1]]
    for size in sorted(alone) + sizes:
        if all(size >= k * KNOT_RATIO or k >= size * KNOT_RATIO for k in knots):
            knots.append(size)
    return sorted(knots)


def _design(points: Sequence[Point], knots: Sequence[int]) -> np.ndarray:
    """Rows: points. Columns: g at the first knot, its rise to each next one, a, b, p, d."""
    ends = np.array(knots, dtype=float)
    rows = []
    for point in points:
        rise = np.clip((point.tokens - ends[:-1]) / np.diff(ends), 0, 1)
        pairs = sum(n * (kv + (n + 1) / 2) for n, kv in point.prefill)
        extra = [pairs, sum(point.decode_kv), len(point.prefill), len(point.decode_kv)]
        rows.append([1.0, *rise, *extra])
    return np.array(rows)


def _solve(design: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Non-negative coefficients with the least relative error, outliers weighed down."""
    from scipy.optimize import nnls

    weights = np.ones(len(times))
    for _ in range(4):
        scale = weights / times
        # columns of about one size, or nnls stops early on the query-key pairs (1e6 to 1e9)
        size = np.maximum(np.abs(design * scale[:, None]).max(axis=0), 1e-300)
        x, _ = nnls(design * scale[:, None] / size, weights)
        x = x / size
        residual = np.abs(design @ x / times - 1)
        limit = max(HUBER * float(np.median(residual)), 1e-6)
        weights = np.sqrt(np.minimum(1, limit / np.maximum(residual, 1e-12)))
    return x


def _left_out_errors(design: np.ndarray, times: np.ndarray, knots: int) -> np.ndarray:
    """Relative error at each of (up to `LEFT_OUT`) points, fitted without it.

    Points at the ends of g stay in: without them the prediction would be an extrapolation, which
    a cost refuses.
    """
    sizes = design[:, :knots].sum(axis=1)
    inner = [i for i, size in enumerate(sizes) if sizes.min() < size < sizes.max()]
    chosen = inner or range(len(times))
    if len(chosen) > LEFT_OUT:
        chosen = [chosen[i] for i in np.linspace(0, len(chosen) - 1, LEFT_OUT).astype(int)]
    errors = []
    for i in chosen:
        keep = np.arange(len(times)) != i
        x = _solve(design[keep], times[keep])
        errors.append(float(design[i] @ x / times[i] - 1))
    return np.array(errors)


def _cost(
    x: np.ndarray, knots: Sequence[int], points: Sequence[Point], measure_with: str
) -> StepCost:
    pair, decode_kv, prefill_request, decode_request = (float(v) for v in x[len(knots) :])
    return StepCost(
        knots_tokens=tuple(knots),
        knots_us=tuple(float(v) for v in np.cumsum(x[: len(knots)])),
        prefill_pair_us=pair,
        decode_kv_us=decode_kv,
        prefill_request_us=prefill_request,
        decode_request_us=decode_request,
        max_context_tokens=max(point.context for point in points),
        noise=0.0,
        error_median=0.0,
        error_p90=0.0,
        measure_with=measure_with,
    )
