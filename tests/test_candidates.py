"""Headroom, lane and the candidate budgets."""

import pytest

from chunk_planner.candidates import (
    Workload,
    block_ladder,
    candidate_budgets,
    headroom_tokens,
    is_candidate,
    second_prefill,
)
from chunk_planner.errors import PlannerError
from chunk_planner.rule import ChunkRule
from chunk_planner.schedule import Request, plan_schedule


@pytest.mark.parametrize(
    ("decodes", "k", "slots", "expected"),
    [(0, 0, 0, 0), (6, 0, 0, 6), (6, 3, 0, 24), (6, 3, 1, 31), (0, 0, 1, 1)],
)
def test_headroom_charges_decodes_and_draft_slots(decodes, k, slots, expected):
    workload = Workload(num_speculative_tokens=k)
    assert headroom_tokens(workload, decodes, slots) == expected


def test_one_block_counts_every_sequence_and_more_blocks_the_typical():
    workload = Workload(max_num_seqs=200)
    assert workload.decodes(1) == 200
    assert workload.decodes(2) == 64
    assert Workload(max_num_seqs=200, kv_cache_requests=5).decodes(2) == 5
    assert Workload(max_num_seqs=200, max_num_active_seqs=40).decodes(1) == 40
    assert Workload(max_num_seqs=200, expected_decodes=9).decodes(2) == 9


def test_candidate_is_blocks_headroom_lane_rounded():
    workload = Workload(max_num_seqs=16, num_speculative_tokens=3)
    # 2 * 1152 + 16 * 4 + 512 = 2880, a multiple of 64 already
    assert candidate_budgets(1152, 2, workload, 0) == (2880, 2880)
    # draft slots are charged to the batched budget alone: 2 * 1152 + 16 * 4 + 17 + 512
    assert candidate_budgets(1152, 2, workload, 1) == (2944, 2880)


def test_rounding_never_reaches_the_next_block():
    workload = Workload(max_num_seqs=1, short_prompt_tokens=100)
    # 128 + 1 + 100 = 229 would round to 256, a second block
    assert candidate_budgets(128, 1, workload, 0)[0] == 229


@pytest.mark.parametrize("block", [16, 128, 528, 784, 1152, 2096, 8320])
@pytest.mark.parametrize("slots", [0, 1, 3])
@pytest.mark.parametrize("seqs", [1, 16, 256, 1024])
def test_what_was_recommended_is_recognised(block, slots, seqs):
    workload = Workload(max_num_seqs=seqs, num_speculative_tokens=slots)
    for blocks in (1, 2, 3, 7):
        budget, _ = candidate_budgets(block, blocks, workload, slots)
        assert is_candidate(budget, block, workload, slots)


def test_a_smaller_kv_pool_still_recognises_what_a_larger_one_recommended():
    before = Workload(num_speculative_tokens=3, kv_cache_requests=40)
    after = Workload(num_speculative_tokens=3, kv_cache_requests=20)
    budget, _ = candidate_budgets(1152, 2, before, 0)
    assert budget > candidate_budgets(1152, 2, after, 0)[0]
    assert is_candidate(budget, 1152, after, 0)


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("slots", [0, 1])
def test_the_cap_lets_a_second_long_prompt_in(blocks, slots):
    workload = Workload(max_num_seqs=16)
    threshold, budget = second_prefill(1152, blocks, workload, slots)
    rule = ChunkRule(1152, budget, long_prefill_token_threshold=threshold, draft_slots=slots)
    decodes = [Request(0, 1, 400) for _ in range(14)]
    long = [Request(1, 60_000, 1), Request(1, 60_000, 1)]
    planned = plan_schedule(rule, [*decodes, *long], max_num_seqs=16, max_steps=6)
    for step in planned.steps[2:]:
        assert step[14][1] == threshold
        assert step[15][1] >= 1152
    # and without the cap the second one waits
    uncapped = plan_schedule(
        ChunkRule(1152, budget, draft_slots=slots), [*decodes, *long], max_num_seqs=16, max_steps=6
    )
    assert all(15 not in step for step in uncapped.steps)


@pytest.mark.parametrize("budget", [2048, 2304, 2305, 1152, 1153, 4096])
def test_other_budgets_are_no_candidates(budget):
    assert not is_candidate(budget, 1152, Workload(max_num_seqs=256), 0)


def test_a_budget_of_many_blocks_is_recognised_without_counting_up_to_it(monkeypatch):
    from chunk_planner import candidates

    calls = []
    monkeypatch.setattr(candidates, "candidate_budgets", lambda *args: calls.append(args) or (0, 0))
    assert not is_candidate(2**31 - 1, 16, Workload(max_num_seqs=16), 0)
    assert len(calls) < 20


def test_a_lane_of_a_block_is_refused():
    with pytest.raises(PlannerError, match="short_prompt_tokens = 1152 must be below the block"):
        candidate_budgets(1152, 2, Workload(short_prompt_tokens=1152), 0)
    assert Workload(short_prompt_tokens=1151).lane(1152) == 1151


def test_ladder_is_dense_where_it_matters_and_sparse_beyond():
    ladder = block_ladder(17, 128, 16384)
    assert ladder[:5] == [1, 2, 3, 4, 5]
    assert {17, 18} <= set(ladder)
    assert len(ladder) < 25
    assert block_ladder(1, 8320, 4096) == [1, 2]


@pytest.mark.parametrize(
    ("field", "value"), [("max_num_seqs", 0), ("expected_decodes", -1), ("short_prompt_tokens", -5)]
)
def test_bad_workloads_are_refused_by_name(field, value):
    with pytest.raises(PlannerError, match=rf"{field} = {value}"):
        Workload(**{field: value})


def test_more_decodes_than_sequences_is_refused():
    with pytest.raises(PlannerError, match="expected_decodes = 20 exceeds the 16"):
        Workload(max_num_seqs=16, expected_decodes=20)
