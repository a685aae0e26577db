"""The recommendation: rule-only and with step costs, against the published cases."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from chunk_planner.budget import recommend
from chunk_planner.errors import PlannerError
from chunk_planner.recommendation import Constraints
from chunk_planner.rule import ChunkRule


@dataclass(frozen=True)
class Affine:
    """A step of `fixed_us` plus `token_us` a token: the shape published chunk curves have."""

    fixed_us: float
    token_us: float
    min_tokens: int = 1
    max_tokens: int = 16384
    max_context_tokens: int = 131072
    uncertainty: float = 0.0
    evidence: str = "measured-engine"

    def step_us(
        self, prefill: Sequence[tuple[int, int]] = (), decode_kv: Sequence[int] = ()
    ) -> float:
        tokens = sum(n for n, _ in prefill) + len(decode_kv)
        if not self.min_tokens <= tokens <= self.max_tokens:
            raise PlannerError(f"a step of {tokens} tokens was not measured")
        return self.fixed_us + self.token_us * tokens


def kinds(found):
    return [finding.kind for finding in found.findings]


# block, budget, idle share of a lone long prompt: published settings (facts of the reports)
REPORTED = [
    (1152, 2048, 0.4375),
    (2096, 2048, 0.488),
    (2096, 4096, 0.488),
    (4176, 8192, 0.490),
    (1600, 4096, 0.219),
]


@pytest.mark.parametrize(("block", "budget", "idle"), REPORTED)
def test_reported_settings_idle_what_their_owners_found(block, budget, idle):
    current = recommend(ChunkRule(block, budget)).current
    assert current.idle_share == pytest.approx(idle, abs=0.001)


@pytest.mark.parametrize(("block", "budget", "idle"), REPORTED)
def test_rule_only_steps_up_by_the_smallest_amount_or_keeps(block, budget, idle):
    found = recommend(ChunkRule(block, budget), max_num_seqs=16)
    best = found.recommended
    if idle <= 0.25:
        assert found.keeps
        assert found.findings == ()
        return
    assert best.max_num_batched_tokens > budget
    assert best.tokens_per_step > found.current.tokens_per_step
    smaller = [
        c
        for c in found.candidates
        if budget < c.max_num_batched_tokens < best.max_num_batched_tokens
    ]
    assert all(c.tokens_per_step <= found.current.tokens_per_step for c in smaller)


@pytest.mark.parametrize("block", [128, 528, 784, 1152, 1600, 2096, 4176, 8320])
@pytest.mark.parametrize("budget", [200, 1168, 2048, 2304, 4096, 8192, 16384])
@pytest.mark.parametrize("seqs", [1, 16, 256, 1024])
@pytest.mark.parametrize(("k", "slots"), [(0, 0), (3, 0), (3, 1)])
def test_a_recommended_budget_is_kept(block, budget, seqs, k, slots):
    rule = ChunkRule(block, budget, draft_slots=slots)
    first = recommend(rule, max_num_seqs=seqs, num_speculative_tokens=k)
    value = first.recommended.max_num_batched_tokens
    again = recommend(rule.with_budget(value), max_num_seqs=seqs, num_speculative_tokens=k)
    assert again.findings == ()
    assert again.keeps


@pytest.mark.parametrize("seqs", [1, 16, 64])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_candidates_keep_their_blocks_beside_the_decodes(seqs, blocks):
    found = recommend(ChunkRule(1152, 2048), max_num_seqs=seqs, num_speculative_tokens=3)
    one = next(c for c in found.candidates if c.blocks == blocks)
    left = one.max_num_batched_tokens - 4 * one.decodes
    assert left // 1152 >= blocks
    assert one.short_prompt_wait_steps == 0


def test_exactly_one_block_warns_of_decodes():
    found = recommend(ChunkRule(2048, 2048), max_num_seqs=64)
    assert kinds(found) == ["no_headroom"]
    assert found.current.stalls_above_decodes == 0
    assert found.recommended.max_num_batched_tokens > 2048 + 64


def test_seventeen_decodes_beside_one_block():
    assert "no_headroom" in kinds(recommend(ChunkRule(1152, 1168), max_num_seqs=17))
    assert "no_headroom" not in kinds(recommend(ChunkRule(1152, 1168), max_num_seqs=16))


def test_a_budget_where_nothing_moves_is_not_also_told_of_idle_tokens():
    found = recommend(ChunkRule(1152, 1152, draft_slots=1))
    assert "stalled" in kinds(found)
    assert not {"idle", "saw_tooth"} & set(kinds(found))


@pytest.mark.parametrize(("block", "budget"), [(1152, 2048), (2096, 2048)])
def test_a_threshold_below_a_block_is_not_mended_by_a_budget(block, budget):
    found = recommend(ChunkRule(block, budget, "0.30", long_prefill_token_threshold=512))
    assert kinds(found) == ["small_threshold"]
    assert found.keeps


@pytest.mark.parametrize(
    ("block", "longest", "note"),
    [(1152, 2048, "prompts_fit_a_step"), (4176, 4000, "prompts_below_block")],
)
def test_prompts_that_no_budget_cuts_shorter_change_nothing(block, longest, note):
    found = recommend(ChunkRule(block, 2048), constraints=Constraints(max_model_len=longest))
    assert found.findings == ()
    assert found.keeps
    assert [one.kind for one in found.notes] == [note]
    longer = Constraints(max_model_len=2 * block + 1)
    assert recommend(ChunkRule(block, 2048), constraints=longer).findings


def test_draft_slots_at_one_block_hang_and_are_mended():
    found = recommend(ChunkRule(1152, 1152, draft_slots=1), max_num_seqs=1)
    assert kinds(found)[0] == "stalled"
    assert found.recommended.stalled is None


def test_multi_module_mtp_below_one_block_hangs_and_is_mended_by_a_block():
    rule = ChunkRule(2096, 2048, prefill_lookahead_tokens=3, hash_lookahead_tokens=3)
    found = recommend(rule, max_num_seqs=16, num_speculative_tokens=3)
    assert kinds(found)[0] == "stalled"
    assert found.recommended.max_num_batched_tokens > 2096
    assert found.recommended.stalled is None


def test_both_budgets_are_raised_where_the_user_set_both():
    rule = ChunkRule(1152, 4096, max_num_scheduled_tokens=2048)
    found = recommend(rule, max_num_seqs=16)
    assert found.current.idle_share == pytest.approx(0.4375)
    assert found.recommended.max_num_scheduled_tokens > 2304
    assert found.recommended.max_num_batched_tokens >= found.recommended.max_num_scheduled_tokens


def test_a_cap_the_user_set_is_respected_up_to_0_30_and_ignored_after():
    capped = {"long_prefill_token_threshold": 1152}
    assert recommend(ChunkRule(1152, 4096, "0.30", **capped)).findings == ()
    assert kinds(recommend(ChunkRule(1152, 2048, "0.31", **capped))) == ["idle"]


def test_lmcache_takes_its_own_range():
    found = recommend(ChunkRule(784, 2048), max_num_seqs=16, constraints=Constraints(lmcache=True))
    assert kinds(found) == ["lmcache"]
    assert found.recommended.max_num_batched_tokens == 2 * 784 - 1
    inside = recommend(ChunkRule(784, 1567), max_num_seqs=16, constraints=Constraints(lmcache=True))
    assert inside.findings == ()
    assert inside.keeps


def test_lmcache_at_one_block_still_needs_headroom():
    # published: 784 -> 1567 took the same load from 1 running request to 27, 3.7x faster
    limits = Constraints(lmcache=True)
    found = recommend(ChunkRule(784, 784), constraints=limits)
    assert kinds(found) == ["no_headroom"]
    assert found.recommended.max_num_batched_tokens == 1567
    # more sequences than any budget LMCache takes has room for: nothing better can be said
    again = recommend(ChunkRule(784, 1567), max_num_seqs=1024, constraints=limits)
    assert again.findings == ()
    assert again.keeps


def test_kv_cache_left_rules_budgets_out():
    @dataclass
    class Left:
        kv_tokens: int
        fits: bool

    limits = Constraints(
        max_model_len=100_000, kv_left=lambda budget: Left(200_000 - 30 * budget, budget < 3000)
    )
    found = recommend(ChunkRule(1152, 2048), max_num_seqs=16, constraints=limits)
    assert found.recommended.max_num_batched_tokens < 3000
    out = [c for c in found.candidates if c.max_num_batched_tokens >= 3000]
    assert out
    assert all("does not hold 100000 tokens" in c.infeasible for c in out)


def test_flat_cost_makes_the_idle_share_irrelevant():
    # 1 us a token and nothing else: a dense model, compute bound
    found = recommend(ChunkRule(1152, 2048), max_num_seqs=16, cost=Affine(0.0, 1.0))
    assert found.evidence == "measured-engine"
    assert found.findings == ()
    assert found.recommended.max_num_batched_tokens <= 2048


def test_fixed_cost_buys_blocks_until_the_plateau():
    found = recommend(ChunkRule(1152, 2048), max_num_seqs=16, cost=Affine(50_000.0, 30.0))
    assert kinds(found) == ["slowdown"]
    # the prompt is 32768 tokens: time per token falls with every block that removes a step
    assert found.current.slowdown > 0.5
    assert found.recommended.slowdown <= 0.03
    cheaper = [
        c
        for c in found.candidates
        if c.max_num_batched_tokens < found.recommended.max_num_batched_tokens
    ]
    assert all(max(c.slowdown, c.slowdown_with_decodes) > 0.03 for c in cheaper)


def test_measured_slowdown_is_told_of_a_candidate_too():
    # 200 is what the rule alone would suggest for one block and 8 sequences
    rule = ChunkRule(128, 200)
    assert recommend(rule, max_num_seqs=8).findings == ()
    assert kinds(recommend(rule, max_num_seqs=8, cost=Affine(50_000.0, 30.0))) == ["slowdown"]


@pytest.mark.parametrize("fixed_us", [0.0, 1_000.0, 50_000.0])
@pytest.mark.parametrize("uncertainty", [0.0, 0.12])
@pytest.mark.parametrize("block", [128, 1152, 2096])
def test_a_budget_recommended_from_cost_is_kept_silent(block, uncertainty, fixed_us):
    cost = Affine(fixed_us, 30.0, uncertainty=uncertainty)
    first = recommend(ChunkRule(block, 2048), max_num_seqs=16, cost=cost)
    value = first.recommended.max_num_batched_tokens
    again = recommend(ChunkRule(block, value), max_num_seqs=16, cost=cost)
    assert again.findings == ()


def test_uncertainty_widens_the_plateau():
    quiet = recommend(ChunkRule(1152, 2048), max_num_seqs=16, cost=Affine(50_000.0, 30.0))
    noisy = recommend(
        ChunkRule(1152, 2048), max_num_seqs=16, cost=Affine(50_000.0, 30.0, uncertainty=0.2)
    )
    assert noisy.recommended.max_num_batched_tokens < quiet.recommended.max_num_batched_tokens


def test_budgets_outside_the_measured_range_are_not_recommended():
    cost = Affine(50_000.0, 30.0, max_tokens=4000)
    found = recommend(ChunkRule(1152, 2048), max_num_seqs=16, cost=cost)
    assert found.recommended.tokens_per_step <= 4000
    assert [note.kind for note in found.notes] == ["still_on_slope"]


def test_latency_bound_rules_out_long_steps():
    limits = Constraints(slo_itl_ms=150.0)
    found = recommend(
        ChunkRule(1152, 2048), max_num_seqs=16, cost=Affine(50_000.0, 30.0), constraints=limits
    )
    assert found.recommended.mixed_step_ms <= 150.0
    with pytest.raises(PlannerError, match="no budget meets"):
        recommend(
            ChunkRule(1152, 2048),
            max_num_seqs=16,
            cost=Affine(50_000.0, 30.0),
            constraints=Constraints(slo_itl_ms=1.0),
        )


def test_a_step_that_was_not_measured_meets_no_latency_bound():
    # 16 decodes beside three blocks are 3472 tokens, more than was measured
    found = recommend(
        ChunkRule(1152, 2048),
        max_num_seqs=16,
        cost=Affine(50_000.0, 30.0, max_tokens=3460),
        constraints=Constraints(slo_itl_ms=10_000.0),
    )
    assert found.recommended.mixed_step_ms is not None
    unmeasured = [c for c in found.candidates if c.slowdown is not None and c.mixed_step_ms is None]
    assert unmeasured
    assert all(c.infeasible == "its step with decodes was not measured" for c in unmeasured)


def test_latency_bound_without_measured_cost_is_refused():
    with pytest.raises(PlannerError, match="calibrate"):
        recommend(ChunkRule(1152, 2048), constraints=Constraints(slo_itl_ms=50.0))


def test_prompts_shorter_than_a_block_are_told_so():
    found = recommend(ChunkRule(2096, 2048), prompt_tokens=900)
    assert found.keeps
    assert [note.kind for note in found.notes] == ["prompts_below_block"]
