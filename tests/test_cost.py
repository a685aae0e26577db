"""Step cost: the fit finds known coefficients, refuses what was not measured, names the knee."""

import random
from dataclasses import replace

import pytest

from chunk_planner.cost import Point, StepCost
from chunk_planner.errors import PlannerError
from chunk_planner.fit import aggregate, fit

#: An engine with a floor, a knee and all four other terms; times in microseconds.
FLOOR_US, KNEE, TOKEN_US = 9_000.0, 256, 40.0
PAIR_US, KV_US, PREFILL_US, DECODE_US = 0.004, 0.5, 700.0, 150.0


def true_us(prefill, decode_kv) -> float:
    tokens = sum(n for n, _ in prefill) + len(decode_kv)
    return (
        FLOOR_US
        + TOKEN_US * max(0, tokens - KNEE)
        + PAIR_US * sum(n * (kv + (n + 1) / 2) for n, kv in prefill)
        + KV_US * sum(decode_kv)
        + PREFILL_US * len(prefill)
        + DECODE_US * len(decode_kv)
    )


def measured_points(noise: float = 0.0, seed: int = 0) -> list[Point]:
    draw = random.Random(seed)
    steps = []
    for n in (16, 64, 128, 256, 512, 1024, 2048):
        steps += [([(n, kv)], []) for kv in (0, n, 4 * n, 12_000)]
    for d in (1, 2, 4, 8):
        steps += [([], [900] * d), ([], [9000] * d), ([(512, 512)], [2000] * d)]
        steps.append(([(64, 0)] * d, []))
    times = [
        (tuple(p), tuple(kv), true_us(p, kv) * (1 + noise * draw.random()))
        for p, kv in steps
        for _ in range(5)
    ]
    return aggregate(times)


def test_the_fit_finds_the_coefficients() -> None:
    cost = fit(measured_points())
    assert cost.prefill_pair_us == pytest.approx(PAIR_US, rel=0.02)
    assert cost.decode_kv_us == pytest.approx(KV_US, rel=0.02)
    assert cost.prefill_request_us == pytest.approx(PREFILL_US, rel=0.05)
    assert cost.decode_request_us == pytest.approx(DECODE_US, rel=0.05)
    assert cost.error_p90 < 0.03
    assert cost.noise == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_it_predicts_mixes_it_has_not_seen(seed: int) -> None:
    cost = fit(measured_points(noise=0.04, seed=seed))
    draw = random.Random(seed)
    for _ in range(50):
        prefill = [(draw.randint(16, 900), draw.randint(0, 10_000)) for _ in range(2)]
        decode_kv = [draw.randint(100, 9000) for _ in range(draw.randint(0, 8))]
        assert cost.step_us(prefill, decode_kv) == pytest.approx(
            true_us(prefill, decode_kv), rel=0.09
        )


def test_one_disturbed_size_does_not_bend_the_curve() -> None:
    """A chunk size that another process disturbed at one context in every repeat."""
    points = measured_points()
    spoilt = [
        replace(p, p20_us=3 * p.p20_us, p50_us=3 * p.p50_us, p80_us=3 * p.p80_us)
        if p.prefill == ((512, 512),) and not p.decode_kv
        else p
        for p in points
    ]
    assert fit(spoilt).step_us([(512, 0)]) == pytest.approx(
        fit(points).step_us([(512, 0)]), rel=0.04
    )


def test_steps_that_decode_along_are_one_point() -> None:
    steps = [(((64, 0),), (100 + i,), 10.0 + i) for i in range(3)] + [((), (100,), 7.0)]
    points = aggregate(steps)
    assert [(p.tokens, p.repeats) for p in points] == [(1, 1), (65, 3)]
    assert points[1].p50_us == 11.0


def test_noise_is_the_spread_of_repeats_or_else_the_disagreement_of_points() -> None:
    noisy = fit(measured_points(noise=0.1))
    assert 0.01 < noisy.noise < 0.08
    once = [replace(point, repeats=1) for point in measured_points(noise=0.1)]
    assert fit(once).noise == fit(once).error_median > 0


def test_steps_that_compiled_for_a_minute_still_make_a_table() -> None:
    """All there is after Ctrl-C in the first round."""
    from chunk_planner.tables import check, engine_table
    from chunk_planner.tables.schema import FINGERPRINT

    sizes = [16, 64, 128, 256, 512]
    points = aggregate((((n, 0),), (), 60e6 if n in (64, 512) else 5e3 + n) for n in sizes)
    fingerprint = {
        name: {"integer": 1, "boolean": True}.get(kind["type"], "x")
        for name, kind in FINGERPRINT.items()
    }
    provenance = {"measured_at": "now", "command": "test", "complete": False}
    table = engine_table(points, fit(points), fingerprint, provenance, None)
    assert check(table.data).cost.error_p90 > 100


def test_outside_the_measured_range_it_names_the_command() -> None:
    cost = fit(measured_points(), measure_with="chunk-planner calibrate my/model")
    assert (cost.min_tokens, cost.max_tokens) == (1, 2048)
    with pytest.raises(
        PlannerError, match=r"4096 tokens.*calibrate my/model --max-num-batched-tokens 4096"
    ):
        cost.step_us([(4096, 0)])
    with pytest.raises(PlannerError, match=r"context of 20064.*--context-tokens 20064"):
        cost.step_us([(64, 20_000)])
    with pytest.raises(PlannerError, match="a step of 0 tokens"):
        cost.step_us()
    with pytest.raises(PlannerError, match="two step sizes"):
        fit(measured_points()[:1])


def curve(
    us_per_token: dict[int, float], noise: float = 0.0, error: float | None = None
) -> StepCost:
    sizes = sorted(us_per_token)
    times = [n * us_per_token[n] for n in sizes]
    return StepCost(
        tuple(sizes), tuple(times), 0, 0, 0, 0, 10**6, noise, noise if error is None else error, 0
    )


def test_the_knee_is_the_smallest_size_inside_the_uncertainty() -> None:
    per_token = {128: 40.0, 512: 21.0, 1024: 20.3, 2048: 20.0}
    assert curve(per_token).plateau().knee_tokens == 2048
    assert curve(per_token).plateau().open_ended
    flat = curve(per_token, noise=0.02).plateau()
    assert (flat.knee_tokens, flat.best_tokens, flat.open_ended) == (1024, 2048, False)
    assert curve(per_token, noise=0.06).plateau().knee_tokens == 512
    # repeats that spread do not blur a curve whose points agree, nor the other way round
    assert curve(per_token, noise=0.06, error=0.02).plateau().knee_tokens == 1024
    assert curve(per_token, noise=0.02, error=0.06).plateau().knee_tokens == 1024


def test_knots_are_interpolated() -> None:
    cost = curve({100: 10.0, 200: 10.0})
    assert cost.step_us([(150, 0)]) == pytest.approx(1500)
    assert cost.step_us([(200, 0)]) == pytest.approx(2000)
