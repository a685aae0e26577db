"""The live rule on vLLM's own Scheduler, as installed and with another split."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
vllm = pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from equivalence import random_options, random_requests  # noqa: E402
from real_scheduler import build_scheduler, chunk_rule, run_schedule  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

from chunk_planner.budget import recommend  # noqa: E402
from chunk_planner.engine.live_rule import LiveRule, _release  # noqa: E402
from chunk_planner.errors import PlannerError  # noqa: E402
from chunk_planner.plan import plan_prefill  # noqa: E402
from chunk_planner.rule import RELEASES  # noqa: E402
from chunk_planner.schedule import Request, plan_schedule  # noqa: E402

VERSION = ".".join(vllm.__version__.split(".")[:2])


class OneBlockScheduler(Scheduler):
    """A fork: never more than one block of a prefill in a step."""

    def _mamba_block_aligned_split(self, request, num_new_tokens, *hits):
        aligned = super()._mamba_block_aligned_split(request, num_new_tokens, *hits)
        if request.num_computed_tokens >= request.num_prompt_tokens:
            return aligned
        return min(aligned, self.cache_config.block_size)


def test_splits_like_the_rule_of_the_same_scheduler() -> None:
    rng = random.Random(2)
    for _ in range(60):
        options = random_options(rng, VERSION, (16, 128, 1152))
        scheduler = build_scheduler(num_blocks=8, **options)
        live, rule = LiveRule(scheduler), chunk_rule(scheduler, VERSION)
        for name in ("block_size", "max_num_batched_tokens", "scheduled_budget", "draft_slots"):
            assert getattr(live, name) == getattr(rule, name)
        for num_requests in (1, 2, 7):
            assert live.threshold(num_requests) == rule.threshold(num_requests)
        for _ in range(50):
            prompt = rng.randint(1, 8 * rule.block_size)
            total = prompt + rng.choice([0, rng.randint(0, 50)])
            start, wanted = rng.randint(0, total), rng.randint(1, 6 * rule.block_size)
            arguments = (start, wanted, prompt, total, rng.choice([0, rng.randint(0, total)]))
            assert live.split(*arguments) == rule.split(*arguments)
            assert live.reserve(total - start, wanted) == rule.reserve(total - start, wanted)


def test_a_fork_is_planned_with_its_own_split() -> None:
    scheduler = build_scheduler(
        block_size=128, max_num_batched_tokens=1000, scheduler_cls=OneBlockScheduler
    )
    live = LiveRule(scheduler)
    assert list(plan_prefill(live, 700).chunks) == [128, 128, 128, 128, 128, 60]
    # The installed release would have taken seven blocks at once.
    assert list(plan_prefill(chunk_rule(scheduler, VERSION), 700).chunks) == [640, 60]

    rng = random.Random(4)
    requests = random_requests(rng, 128, "mixed arrivals")
    plan = plan_schedule(live, requests, max_num_seqs=16)
    assert plan.steps == run_schedule(scheduler, requests)
    assert max(tokens for step in plan.steps for _, tokens in step.values()) == 128


def test_the_recommendation_takes_the_fork_as_it_is() -> None:
    scheduler = build_scheduler(
        block_size=1152, max_num_batched_tokens=2048, scheduler_cls=OneBlockScheduler
    )
    # One block a step whatever the budget: no larger one is worth anything.
    found = recommend(LiveRule(scheduler), max_num_seqs=16)
    assert {option.tokens_per_step for option in found.candidates} == {1152}


def test_asking_leaves_no_trace() -> None:
    scheduler = build_scheduler(block_size=128, max_num_batched_tokens=1000)
    before = dict(scheduler.__dict__)
    config = dict(vars(scheduler.scheduler_config))
    live = LiveRule(scheduler)
    plan_prefill(live.with_budget(5000), 10_000)
    plan_schedule(live, [Request(0, 900, 5), Request(1, 300, 2)], max_num_seqs=2)
    assert scheduler.__dict__ == before
    assert vars(scheduler.scheduler_config) == config
    assert not scheduler.running
    assert not scheduler.requests


def test_with_budget_is_the_engine_started_with_it() -> None:
    for budget, scheduled in ((900, None), (4096, 3000)):
        started = {
            "block_size": 1152,
            "max_num_batched_tokens": 2048,
            "long_prefill_token_threshold": 1500,
        }
        changed = {"max_num_batched_tokens": budget, "max_num_scheduled_tokens": scheduled}
        live = LiveRule(build_scheduler(**started)).with_budget(budget, scheduled)
        other = LiveRule(build_scheduler(**{**started, **changed}))
        assert live.max_num_batched_tokens == other.max_num_batched_tokens == budget
        assert live.scheduled_budget == other.scheduled_budget == (scheduled or budget)
        assert live.release == other.release
        for prompt in (800, 20_000):
            assert plan_prefill(live, prompt).chunks == plan_prefill(other, prompt).chunks


def test_follows_the_scheduler_while_it_runs() -> None:
    scheduler = build_scheduler(block_size=1152, max_num_batched_tokens=8192)
    live = LiveRule(scheduler)
    assert plan_prefill(live, 20_000).chunks[0] == 8064
    scheduler.max_num_scheduled_tokens = 2048  # as the calibration does between prompts
    assert plan_prefill(live, 20_000).chunks[0] == 1152


def test_what_a_plan_does_not_know_is_named() -> None:
    class Curious(Scheduler):
        def _mamba_block_aligned_split(self, request, num_new_tokens, *hits):
            return num_new_tokens if request.lora_request else 0

    live = LiveRule(
        build_scheduler(block_size=16, max_num_batched_tokens=64, scheduler_cls=Curious)
    )
    with pytest.raises(PlannerError, match=r"Curious reads request\.lora_request"):
        live.split(0, 10, 100)


def test_a_scheduler_without_the_split_is_refused() -> None:
    scheduler = build_scheduler(block_size=16, max_num_batched_tokens=64)
    scheduler.need_mamba_block_aligned_split = False
    with pytest.raises(PlannerError, match="cuts no prefill on blocks"):
        LiveRule(scheduler)


def test_release_of_an_engine() -> None:
    assert _release("0.32.0+cpu") == RELEASES["0.32"]
    newest = list(RELEASES.values())[-1]
    assert _release("0.99.1") == replace(newest, version="0.99.1")
    for version in ("0.28.0", "dev"):
        with pytest.raises(PlannerError, match="is not supported"):
            _release(version)
