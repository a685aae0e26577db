"""How the prediction benchmark judges a recommended budget, from made-up repeats."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "prediction_error.py"
CHUNKS = {1600: (1152,) * 4, 3840: (3456, 1152), 4032: (3456, 1152), 4992: (4608,)}


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("prediction_error", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def sweep(suggested: int, seconds: dict[int, list[float]]) -> dict:
    return {
        "suggested": suggested,
        "sweep": [
            {"model": "tiny", "block": 1152, "budget": budget, "measured_s": runs}
            for budget, runs in seconds.items()
        ],
        "sweep_steps": [[((n, 0),) for n in CHUNKS[budget]] for budget in seconds],
    }


def test_a_slow_choice_is_regretted(benchmark) -> None:
    found = benchmark._regret(sweep(1600, {1600: [2.2] * 5, 4992: [2.0] * 5}))
    assert found["budget"] == 1600
    assert found["regret"] == pytest.approx(1 - 2.0 / 2.2)
    assert found["interval"] == pytest.approx([found["regret"]] * 2)


def test_budgets_with_the_same_steps_are_one_arm(benchmark) -> None:
    """3840 and 4032 ran the same three blocks: what lies between them is noise, no regret."""
    unlucky = {3840: [2.0, 2.0, 2.0, 2.1, 2.1], 4032: [2.2, 2.3, 2.2, 2.3, 2.2]}
    found = benchmark._regret(sweep(4032, {**unlucky, 4992: [2.1] * 5}))
    assert found["regret"] == 0
    assert found["interval"] == [0, 0]


def test_a_slow_repeat_hits_all_arms_alike(benchmark) -> None:
    """Repeats twice as slow for everybody widen no interval."""
    one, other = [2.0, 4.0, 2.0, 4.0, 2.0], [2.1, 4.2, 2.1, 4.2, 2.1]
    found = benchmark._regret(sweep(3840, {3840: other, 4992: one}))
    assert found["interval"] == pytest.approx([1 - 2.0 / 2.1] * 2)
