"""What the engine sweep makes of its runs; `make demo` and the engine tests have the engine."""

import argparse
import importlib
from pathlib import Path

import pytest

from chunk_planner.engine.step_timer import Run, Step, Workload
from chunk_planner.errors import PlannerError
from chunk_planner.plan import plan_prefill
from chunk_planner.rule import ChunkRule


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return importlib.import_module("engine_sweep")


def runs(rule: ChunkRule, budgets: tuple[int, ...], prompt: int = 4000) -> list[Run]:
    def run(budget: int) -> Run:
        steps, start = [], 0
        for n in plan_prefill(rule.with_budget(budget), prompt).chunks:
            steps.append(Step(((n, start),), (), 1000.0 + n))
            start += n
        return Run(Workload(budget, prompts=(prompt,)), tuple(steps))

    return [run(budget) for budget in budgets for _ in range(2)]


@pytest.mark.parametrize(
    "settings",
    [{}, {"checkpoint_alignment": 256}, {"eagle_block_drop": True}],
    ids=["plain", "a Mamba2 checkpoint inside the last chunk", "EAGLE"],
)
def test_rows_follow_the_rule_of_the_engine(sweep, settings: dict) -> None:
    rule = ChunkRule(512, 8192, vllm_version="0.32", **settings)
    rows = sweep._rows(runs(rule, (512, 2048, 8192)), rule)
    assert [row["tokens_per_step"] for row in rows[:2]] == [512, 2048]
    assert min(row["slowdown"] for row in rows) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [("[1]", "is not a JSON object"), ("{x", "is not valid JSON"), ("1", "is not a JSON object")],
)
def test_engine_arguments_are_an_object(sweep, text: str, said: str, capsys) -> None:
    parser = argparse.ArgumentParser()
    sweep.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--engine-args", text])
    assert f"--engine-args: {text!r} {said}" in capsys.readouterr().err


def test_chunks_that_are_not_the_rules_are_refused(sweep) -> None:
    other = ChunkRule(256, 8192, vllm_version="0.32")
    with pytest.raises(PlannerError, match="the engine scheduled"):
        sweep._rows(runs(other, (700,)), ChunkRule(512, 8192, vllm_version="0.32"))
