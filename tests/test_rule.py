"""The chunk rule: against the installed engine, and what it refuses."""

import numpy as np
import pytest

from chunk_planner.errors import PlannerError
from chunk_planner.rule import SUPPORTED_VERSIONS, ChunkRule, find_release

BLOCK = 1152


@pytest.mark.engine
def test_split_equals_the_installed_engine() -> None:
    from equivalence import compare_splits

    mismatches = compare_splits("0.32", 20_000, seed=20260)
    assert not mismatches, "\n".join(mismatches[:3])


@pytest.mark.parametrize(
    ("budget", "first"), [(1151, 1151), (1152, 1152), (2048, 1152), (3456, 3456), (8192, 8064)]
)
def test_a_long_prompt_gets_whole_blocks(budget: int, first: int) -> None:
    assert ChunkRule(BLOCK, budget).split(0, budget, 20_000) == first


def test_a_prompt_of_whole_blocks_takes_one_chunk_more_from_0_32_on() -> None:
    chunks = {
        version: ChunkRule(BLOCK, 8192, version).split(0, 4608, 4608)
        for version in SUPPORTED_VERSIONS
    }
    assert chunks == {"0.30": 4608, "0.31": 4608, "0.32": 3456, "0.33": 3456}


@pytest.mark.parametrize("version", ["0.33.0", "v0.33.2", "0.33.1+cpu", "0.33"])
def test_patch_releases_share_the_rule(version: str) -> None:
    assert ChunkRule(BLOCK, 2048, version).vllm_version == "0.33"


@pytest.mark.parametrize("version", ["0.28", "0.34.0", "0.3", "nightly", ""])
def test_other_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(PlannerError, match=f"vllm_version = {version!r} is not supported"):
        find_release(version)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size = 0 must be an integer of at least 1"),
        ({"block_size": 1.5}, "block_size = 1.5 must be an integer"),
        ({"block_size": True}, "block_size = True must be an integer"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens = -1"),
        ({"max_num_scheduled_tokens": 0}, "max_num_scheduled_tokens = 0"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold = -1"),
        ({"long_prefill_token_threshold": None}, "long_prefill_token_threshold = None"),
        ({"draft_slots": -1}, "draft_slots = -1"),
        ({"eagle_block_drop": 1}, "eagle_block_drop = 1 must be True or False"),
        ({"checkpoint_alignment": 0}, "checkpoint_alignment = 0"),
        ({"hash_block_size": 100}, "hash_block_size = 100 must divide scheduler_block_size"),
        ({"partial_hits": True}, "partial_hits = True needs hash_block_size"),
        ({"shared_prefix_checkpoint": True}, "shared_prefix_checkpoint = True needs partial_hits"),
        ({"hash_lookahead_tokens": 1, "vllm_version": "0.32"}, "must be 0 before vLLM 0.33"),
        ({"hash_lookahead_tokens": 1, "eagle_block_drop": True}, "needs hash_lookahead_tokens = 0"),
        (
            {"long_prefill_token_threshold_adaptive": True, "vllm_version": "0.30"},
            "must be False before vLLM 0.31",
        ),
    ],
)
def test_bad_values_are_named(options: dict, message: str) -> None:
    with pytest.raises(PlannerError) as error:
        ChunkRule(**{"block_size": BLOCK, "max_num_batched_tokens": 2048, **options})
    assert message in str(error.value)


def test_integers_of_numpy_are_integers() -> None:
    rule = ChunkRule(np.int32(BLOCK), np.int64(2048), long_prefill_token_threshold=np.int16(512))
    assert rule == ChunkRule(BLOCK, 2048, long_prefill_token_threshold=512)
    assert {type(value) for value in (rule.block_size, rule.scheduled_budget)} == {int}
    with pytest.raises(PlannerError, match=r"block_size = np\.float64"):
        ChunkRule(np.float64(BLOCK), 2048)


def test_a_lone_request_ignores_the_threshold_from_0_31_on() -> None:
    thresholds = {
        version: [
            ChunkRule(BLOCK, 2048, version, long_prefill_token_threshold=512).threshold(requests)
            for requests in (1, 2)
        ]
        for version in ("0.30", "0.31")
    }
    assert thresholds == {"0.30": [512, 512], "0.31": [0, 512]}


def test_the_adaptive_threshold_is_at_least_an_even_share() -> None:
    rule = ChunkRule(
        BLOCK, 8192, long_prefill_token_threshold=512, long_prefill_token_threshold_adaptive=True
    )
    assert [rule.threshold(requests) for requests in (1, 2, 4, 100)] == [0, 4096, 2048, 512]


def test_the_reserve_takes_all_or_leaves_the_lookahead() -> None:
    rule = ChunkRule(BLOCK, 8192, prefill_lookahead_tokens=3)
    assert [rule.reserve(10, tokens) for tokens in (10, 9, 8, 7, 2)] == [10, 7, 7, 7, 2]
    assert rule.reserve(2, 1) == 0


def test_with_budget_is_the_same_engine_at_another_budget() -> None:
    rule = ChunkRule(BLOCK, 2048, "0.31", 1200, draft_slots=1)
    assert rule.with_budget(4096) == ChunkRule(BLOCK, 4096, "0.31", draft_slots=1)
    assert rule.with_budget(4096, 3000).scheduled_budget == 3000
