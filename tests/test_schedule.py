"""Whole schedules: against the installed engine, their accounting, and their ends."""

import random

import pytest

from chunk_planner.errors import PlannerError
from chunk_planner.idle import IDLE_REASONS
from chunk_planner.rule import SUPPORTED_VERSIONS, ChunkRule
from chunk_planner.schedule import Request, Schedule, plan_schedule
from chunk_planner.steps import Stepper

BLOCK = 1152


@pytest.mark.engine
def test_schedule_equals_the_installed_engine() -> None:
    from equivalence import compare_schedules

    steps, mismatches = compare_schedules("0.32", 120, seed=20261)
    assert steps > 2000
    assert not mismatches, "\n".join(mismatches[:3])


def left_over(rule: ChunkRule, step: dict[int, tuple[int, int]]) -> int:
    """What the step leaves of both budgets, from what it scheduled."""
    tokens = sum(got for _, got in step.values())
    inputs = rule.max_num_batched_tokens - tokens - rule.draft_slots * len(step)
    return max(0, min(rule.scheduled_budget - tokens, inputs - rule.draft_slots))


def check_accounts(rule: ChunkRule, schedule: Schedule) -> None:
    lists = (schedule.idle_tokens, schedule.no_work_tokens, schedule.blocked_requests)
    assert {len(entries) for entries in (*lists, schedule.starved_requests)} == {
        len(schedule.steps)
    }
    for step, idle, no_work in zip(
        schedule.steps, schedule.idle_tokens, schedule.no_work_tokens, strict=True
    ):
        assert all(charge > 0 for charge in idle.values())
        assert sum(idle.values()) + no_work == left_over(rule, step)


def test_one_long_prompt_running_and_one_waiting() -> None:
    rule = ChunkRule(BLOCK, 2048)
    requests = [Request(0, 50_000, 4), Request(0, 50_000, 4)]
    schedule = plan_schedule(rule, requests, max_num_seqs=16)
    check_accounts(rule, schedule)
    assert schedule.steps[3] == {0: (3 * BLOCK, BLOCK)}
    assert schedule.idle_tokens[3] == {"align_floor": 896}
    assert schedule.blocked_requests[3] == 1


def test_the_third_step_of_a_lone_prompt_at_8192() -> None:
    rule = ChunkRule(BLOCK, 8192)
    schedule = plan_schedule(rule, [Request(0, 20_000, 1)], max_num_seqs=16)
    check_accounts(rule, schedule)
    assert [got for step in schedule.steps for _, got in step.values()] == [8064, 8064, 3456, 416]
    assert schedule.idle_tokens[2] == {"checkpoint_stop": 416}
    assert schedule.no_work_tokens[2] == 4320


def test_a_budget_of_one_block_waits_for_the_decode_to_end() -> None:
    rule = ChunkRule(BLOCK, BLOCK)
    requests = [Request(0, 10, 50), Request(0, 5 * BLOCK, 1)]
    schedule = plan_schedule(rule, requests, max_num_seqs=16)
    check_accounts(rule, schedule)
    assert schedule.stalled is None
    assert not schedule.truncated
    assert schedule.starved_steps == sum(schedule.blocked_requests) == 50
    assert schedule.idle_tokens[1] == {"head_of_line": BLOCK - 1}
    assert schedule.steps[50] == {1: (0, BLOCK)}


def test_a_running_prefill_starves_behind_a_decode() -> None:
    # The budget holds a block and one decode; with drafts the decode takes four tokens.
    rule = ChunkRule(BLOCK, BLOCK + 1)
    requests = [Request(0, 1, 30), Request(0, 3 * BLOCK + 5, 1)]
    schedule = plan_schedule(rule, requests, max_num_seqs=16, num_speculative_tokens=3)
    check_accounts(rule, schedule)
    assert schedule.steps[0] == {0: (0, 1), 1: (0, BLOCK)}
    assert schedule.steps[1] == {0: (1, 4)}
    assert schedule.starved_requests[1] == 1
    assert schedule.idle_tokens[1] == {"starved": BLOCK - 3}
    assert schedule.stalled is None


def test_draft_slots_at_a_budget_of_one_block_stall_for_good() -> None:
    rule = ChunkRule(BLOCK, BLOCK, draft_slots=1)
    schedule = plan_schedule(rule, [Request(0, 20_000, 1), Request(7, 5, 1)], max_num_seqs=16)
    assert schedule.stall.reason == "draft_slots"
    assert f"set at least {BLOCK + 1}" in schedule.stalled
    # It was waited for the last arrival, which is stuck behind it.
    assert len(schedule.steps) == 7
    check_accounts(rule, schedule)


def test_multi_module_mtp_stalls_inside_its_lookahead() -> None:
    rule = ChunkRule(BLOCK, 1000, prefill_lookahead_tokens=3)
    schedule = plan_schedule(rule, [Request(0, 3 * BLOCK + 2, 1)], max_num_seqs=16)
    assert schedule.stall.reason == "lookahead_reserve"
    assert schedule.steps[-1] == {0: (2 * BLOCK + 1000, BLOCK - 1001)}
    fine = plan_schedule(rule, [Request(0, 3 * BLOCK + 3, 1)], max_num_seqs=16)
    assert fine.stalled is None


def test_every_reason_can_be_met() -> None:
    capped = ChunkRule(BLOCK, 4096, long_prefill_token_threshold=500)
    reserving = ChunkRule(BLOCK, 3 * BLOCK + 1, prefill_lookahead_tokens=3)
    cases = [
        (capped, [Request(0, 5000, 1), Request(0, 5000, 1)], 16, 0),
        (ChunkRule(2096, 2048), [Request(0, 9000, 1)], 16, 0),
        (ChunkRule(BLOCK, 3000), [Request(0, 9000, 1)], 16, 0),
        (ChunkRule(BLOCK, 3000), [Request(0, 40, 9), Request(0, 4000, 1)], 1, 0),
        (ChunkRule(BLOCK, BLOCK), [Request(0, 40, 9), Request(0, 4000, 1)], 16, 0),
        (ChunkRule(BLOCK, BLOCK + 1), [Request(0, 1, 30), Request(0, 9000, 1)], 16, 3),
        (reserving, [Request(0, 3 * BLOCK + 2, 1)], 16, 0),
    ]
    seen = set()
    for rule, requests, seqs, drafts in cases:
        schedule = plan_schedule(
            rule, requests, max_num_seqs=seqs, num_speculative_tokens=drafts, max_steps=60
        )
        check_accounts(rule, schedule)
        seen.update(*schedule.idle_tokens)
    assert seen == set(IDLE_REASONS)


def test_repeated_steps_are_the_steps_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(20262)
    repeated = 0
    for _ in range(150):
        block = rng.choice([16, 64])
        rule = ChunkRule(
            block,
            rng.randint(block // 2, 5 * block),
            rng.choice(SUPPORTED_VERSIONS),
            long_prefill_token_threshold=rng.choice([0, 0, 2 * block]),
            draft_slots=rng.choice([0, 0, 1]),
            eagle_block_drop=rng.random() < 0.3,
            prefill_lookahead_tokens=rng.choice([0, 3]),
        )
        requests = []
        for _ in range(rng.choice([1, 3, 9])):
            prompt = rng.randint(1, 60 * block)
            boundary = rng.choice([0, rng.randint(0, prompt)])
            arrival = rng.choice([0, rng.randint(0, 90)])
            requests.append(Request(arrival, prompt, rng.randint(1, 90), 0, boundary))
        drafts = rng.choice([0, 3])
        options = {
            "max_num_seqs": rng.choice([1, 2, 16]),
            "num_speculative_tokens": drafts,
            "accepted_tokens": rng.randint(0, 3),
            "max_steps": rng.choice([100, 2000]),
        }
        ours = plan_schedule(rule, requests, **options)
        check_accounts(rule, ours)
        with monkeypatch.context() as patch:
            patch.setattr(Stepper, "repeats", lambda self, most: 0)
            single = plan_schedule(rule, requests, **options)
        repeated += len(set(map(id, single.idle_tokens))) - len(set(map(id, ours.idle_tokens)))
        assert ours == single
    # Most steps of these mixes were not simulated.
    assert repeated > 5000


def test_empty_steps_before_an_arrival_and_truncation() -> None:
    rule = ChunkRule(BLOCK, 2048)
    schedule = plan_schedule(rule, [Request(3, 10, 5)], max_num_seqs=1, max_steps=5)
    assert schedule.steps == [{}, {}, {}, {0: (0, 10)}, {0: (10, 1)}]
    assert schedule.truncated
    check_accounts(rule, schedule)
    assert not plan_schedule(rule, [Request(3, 10, 2)], max_num_seqs=1, max_steps=5).truncated
    assert plan_schedule(rule, [], max_num_seqs=1).steps == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((-1, 1, 1), "arrival_step = -1 must be at least 0"),
        ((0, 0, 1), "num_prompt_tokens = 0 must be at least 1"),
        ((0, 1, 0), "num_output_tokens = 0 must be at least 1"),
        ((0, 5, 1, 5), "num_computed_tokens = 5 must be below num_prompt_tokens = 5"),
        ((0, 5, 1, 0, -1), "shared_prefix_boundary = -1"),
    ],
)
def test_bad_requests_are_named(fields: tuple, message: str) -> None:
    with pytest.raises(PlannerError) as error:
        Request(*fields)
    assert message in str(error.value)


def test_bad_limits_are_named() -> None:
    rule = ChunkRule(BLOCK, 2048, "0.30")
    for name in ("max_num_seqs", "max_num_active_seqs", "max_steps"):
        with pytest.raises(PlannerError, match=f"{name} = 0 must be at least 1"):
            plan_schedule(rule, [], **{"max_num_seqs": 1, name: 0})
    with pytest.raises(PlannerError, match="accepted_tokens = -1 must be at least 0"):
        plan_schedule(rule, [], max_num_seqs=1, accepted_tokens=-1)
    with pytest.raises(PlannerError, match=r"max_num_active_seqs = 4 .* before vLLM 0\.31"):
        plan_schedule(rule, [], max_num_seqs=8, max_num_active_seqs=4)
