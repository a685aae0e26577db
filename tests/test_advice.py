"""Sentences: every finding has one, with its numbers, its unit and its source."""

import pytest

from chunk_planner import advice
from chunk_planner.budget import recommend
from chunk_planner.diagnosis import Finding
from chunk_planner.recommendation import Constraints
from chunk_planner.rule import ChunkRule

FINDINGS = [
    (Finding("idle"), ["1152 of 2048 tokens", "44 %", "(rule)"]),
    (Finding("saw_tooth"), ["saw-tooth", "(rule)"]),
    (Finding("no_headroom", {"above": 0}), ["any decode in a step stops", "(rule"]),
    (Finding("no_headroom", {"above": 16}), ["more than 16 decoding requests", "(rule"]),
    (Finding("stalled", {"why": "no block ever fits"}), ["no block ever fits", "(rule)"]),
    (Finding("lmcache", {"least": 1152, "most": 2303}), ["LMCache", "1152", "2303", "(rule)"]),
    (Finding("block_mismatch", {"split": 816, "mamba": 1648}), ["816", "1648", "(rule)"]),
    (
        Finding("kv_pool_tight", {"blocks": 20, "needs": 21, "max_model_len": 20480}),
        ["20 blocks", "20480", "needs 21", "(rule)"],
    ),
    (Finding("small_threshold"), ["--long-prefill-token-threshold", "multiple of 1152", "(rule)"]),
]


@pytest.fixture(scope="module")
def found():
    return recommend(ChunkRule(1152, 2048), max_num_seqs=16, num_speculative_tokens=3)


@pytest.mark.parametrize(
    ("finding", "said"), FINDINGS, ids=lambda value: getattr(value, "kind", "")
)
def test_every_finding_has_its_sentence(found, finding, said):
    text = advice.warning(found.with_findings([finding]))
    assert all(words in text for words in said), text


def test_warning_is_one_line_ready_to_paste(found):
    text = advice.warning(found)
    assert "\n" not in text
    assert "--max-num-batched-tokens 2880" in text
    assert "2 x 1152 + 64 for D = 16 decodes" in text


def test_nothing_to_say_is_no_warning():
    assert advice.warning(recommend(ChunkRule(1152, 8192))) is None


def test_only_needs_saying_suggests_no_budget():
    quiet = recommend(ChunkRule(1152, 8192))
    text = advice.warning(quiet.with_findings([FINDINGS[6][0]]))
    assert "--max-num-batched-tokens" not in text


def test_lmcache_is_offered_no_budget_of_two_blocks():
    found = recommend(ChunkRule(784, 1567), constraints=Constraints(lmcache=True))
    assert not any("--long-prefill-token-threshold" in said for said in advice.reasons(found))


def test_both_flags_are_named_where_both_were_set():
    both = recommend(ChunkRule(1152, 4096, max_num_scheduled_tokens=2048), max_num_seqs=16)
    text = advice.warning(both)
    assert "--max-num-batched-tokens" in text
    assert "--max-num-scheduled-tokens" in text


def test_ignored_cap_is_said():
    rule = ChunkRule(1152, 2048, "0.31", long_prefill_token_threshold=1152)
    assert "ignores it for a request that is alone" in advice.warning(recommend(rule))


@pytest.mark.parametrize(("share", "text"), [(0.4375, "44 %"), (0.0, "0 %"), (0.005, "0 %")])
def test_percent(share, text):
    assert advice.percent(share) == text


def test_only_an_engine_calls_the_measured_device_its_own(found):
    """The command line may price with a table that was measured on another machine."""
    slow = found.with_findings([Finding("slowdown", {"slowdown": 0.59})])
    assert "on this device)" in advice.warning(slow)
    (said,) = [sentence for sentence in advice.reasons(slow) if "1.59x slower" in sentence]
    assert said.endswith(f"({slow.evidence}).")
