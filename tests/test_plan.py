"""Plans of one prompt: known cases, and properties that hold for every rule."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunk_planner.errors import PlannerError
from chunk_planner.plan import plan_prefill
from chunk_planner.rule import SUPPORTED_VERSIONS, ChunkRule
from chunk_planner.schedule import Request, plan_schedule
from chunk_planner.stall import room_tokens

BLOCK = 1152


@pytest.mark.parametrize(
    ("budget", "chunks"),
    [
        (1152, [1152] * 17 + [416]),
        (2048, [1152] * 17 + [416]),
        (3072, [2304] * 8 + [1152, 416]),
        (3456, [3456] * 5 + [2304, 416]),
        (4096, [3456] * 5 + [2304, 416]),
        (6144, [5760] * 3 + [2304, 416]),
        (8192, [8064] * 2 + [3456, 416]),
    ],
)
def test_chunks_of_20000_tokens(budget: int, chunks: list[int]) -> None:
    plan = plan_prefill(ChunkRule(BLOCK, budget), 20_000)
    assert plan.chunks == chunks
    assert plan.steps == len(chunks)
    assert plan.tokens_per_step == chunks[0]
    assert plan.idle_share == pytest.approx(1 - chunks[0] / budget)
    assert plan.idle_share_with_decodes == pytest.approx(plan.idle_share)
    assert plan.stalled is None


def test_a_block_wider_than_the_budget_saws() -> None:
    plan = plan_prefill(ChunkRule(2096, 2048), 20_000)
    assert plan.chunks == [2048, 48] * 9 + [1136]
    assert plan.tokens_per_step == 1048
    assert plan.idle_share == pytest.approx(0.488, abs=5e-4)
    assert plan.idle_tokens == {"saw_tooth": 2000 * 8 + 1136}
    assert plan.checkpoints == [2096 * n for n in range(1, 10)]


@pytest.mark.parametrize(
    ("options", "budget", "chunks"),
    [
        # one block merged into the last chunk where attention drops its last hit block
        ({"eagle_block_drop": True}, 2048, [1152] * 16 + [1568]),
        ({"hash_lookahead_tokens": 1}, 2048, [1152] * 17 + [416]),
        ({"checkpoint_alignment": 16}, 2048, [1152] * 16 + [1568]),
        ({"checkpoint_alignment": 16}, 3072, [2304] * 8 + [1568]),
        ({"hash_block_size": 64, "partial_hits": True}, 2048, [1152] * 17 + [384, 32]),
    ],
)
def test_the_last_chunks(options: dict, budget: int, chunks: list[int]) -> None:
    assert plan_prefill(ChunkRule(BLOCK, budget, **options), 20_000).chunks == chunks


@pytest.mark.parametrize(
    ("budget", "decodes", "drafts", "per_step"),
    [
        (2048, 6, 0, 1152),
        (2304, 6, 0, 1152),
        (2310, 6, 0, 2304),
        (2327, 24, 3, 1152),
        (2328, 24, 3, 2304),
    ],
)
def test_decodes_ahead(budget: int, decodes: int, drafts: int, per_step: int) -> None:
    plan = plan_prefill(
        ChunkRule(BLOCK, budget),
        20_000,
        decode_tokens=decodes,
        decode_requests=decodes // (1 + drafts),
    )
    assert plan.tokens_per_step == per_step
    assert plan.idle_share_with_decodes == pytest.approx(1 - per_step / (budget - decodes))


def test_the_smallest_budget_that_keeps_two_blocks_behind_decodes_with_draft_slots() -> None:
    decodes, drafts, slots = 6, 3, 1
    need = 2 * BLOCK + decodes * (1 + drafts) + slots * (decodes + 1)
    for budget, per_step in ((need, 2 * BLOCK), (need - 1, BLOCK)):
        plan = plan_prefill(
            ChunkRule(BLOCK, budget, draft_slots=slots),
            20_000,
            decode_tokens=decodes * (1 + drafts),
            decode_requests=decodes,
        )
        assert plan.tokens_per_step == per_step


def test_no_headroom_stalls_while_the_decode_lasts() -> None:
    plan = plan_prefill(ChunkRule(BLOCK, BLOCK), 20_000, decode_tokens=1)
    assert plan.stall.reason == "no_headroom"
    assert not plan.stall.for_good
    assert "1151 of 1152" in plan.stalled
    assert plan.chunks == []
    assert plan.tokens_per_step == 0
    # without decodes nothing is idle at this budget
    assert plan.idle_share == 0


def test_a_block_wider_than_the_budget_needs_any_room() -> None:
    plan = plan_prefill(ChunkRule(2096, 2048), 20_000, decode_tokens=2048)
    assert "leave 0 of 2048 tokens a step and the next chunk needs 1" in plan.stalled
    assert not plan_prefill(ChunkRule(2096, 2048), 20_000, decode_tokens=2047).stalled


def test_a_token_budget_above_the_input_budget_is_not_idle() -> None:
    rule = ChunkRule(BLOCK, 2048, max_num_scheduled_tokens=8192)
    plan = plan_prefill(rule, 20_000)
    assert plan.idle_share == plan_prefill(ChunkRule(BLOCK, 2048), 20_000).idle_share
    busy = plan_prefill(rule, 20_000, decode_tokens=1000)
    assert "leave 1048 of 2048 tokens" in busy.stalled


def test_draft_slots_at_one_block_stall_for_good() -> None:
    plan = plan_prefill(ChunkRule(BLOCK, BLOCK, draft_slots=1), 20_000)
    assert plan.stall.reason == "draft_slots"
    assert plan.stall.for_good
    for budget in (BLOCK - 1, BLOCK + 1):
        assert plan_prefill(ChunkRule(BLOCK, budget, draft_slots=1), 20_000).stalled is None


@pytest.mark.parametrize("over", range(5))
def test_multi_module_mtp_stalls_just_above_a_boundary(over: int) -> None:
    rule = ChunkRule(BLOCK, 1000, prefill_lookahead_tokens=3)
    plan = plan_prefill(rule, 17 * BLOCK + over)
    if over in (1, 2):
        assert plan.stall.reason == "lookahead_reserve"
        assert sum(plan.chunks) == 17 * BLOCK - 3 + over
    else:
        assert plan.stalled is None


def test_idle_tokens_of_a_lone_prompt_at_8192() -> None:
    plan = plan_prefill(ChunkRule(BLOCK, 8192), 20_000)
    assert plan.idle_tokens == {"align_floor": 2 * 128, "checkpoint_stop": 416}
    assert plan.no_work_tokens == 4320 + 8192 - 416


def test_checkpoints_inside_and_at_the_tail() -> None:
    inside = plan_prefill(ChunkRule(BLOCK, 3072, checkpoint_alignment=16), 20_000)
    # every chunk of two blocks exports the boundary inside it too
    assert inside.checkpoints == [BLOCK * n for n in range(1, 18)]
    tail = plan_prefill(ChunkRule(BLOCK, 8192, hash_block_size=64, partial_hits=True), 20_000)
    assert tail.checkpoints[-2:] == [17 * BLOCK, 19_968]
    exact = ChunkRule(
        BLOCK, 8192, hash_block_size=64, partial_hits=True, shared_prefix_checkpoint=True
    )
    assert 6400 in plan_prefill(exact, 20_000, shared_prefix_boundary=6400).checkpoints


@pytest.mark.engine
def test_checkpoints_are_the_states_the_engine_caches() -> None:
    """Without retention (`prefix_cache_retention_interval` unset), block by block."""
    import vllm
    from real_scheduler import _engine_request, build_scheduler, chunk_rule
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    rng = random.Random(3)
    inside = 0
    for _ in range(80):
        drafter = rng.choice(["none", "none", "eagle", "mtp"])
        scheduler = build_scheduler(
            block_size=16,
            max_num_batched_tokens=rng.choice([15, 16, 17, 32, 40, 100]),
            drafter=drafter,
            num_speculative_tokens=0 if drafter == "none" else 2,
            checkpoint_alignment=rng.choice([None, 1, 4]),
            num_blocks=500,
        )
        manager = scheduler.kv_cache_manager
        mamba = manager.coordinator.single_type_managers[1]
        for store in (manager, *manager.coordinator.single_type_managers):
            store.enable_caching = True
        prompt = rng.choice([rng.randint(1, 150), 16 * rng.randint(1, 8) + rng.randint(-1, 1)])
        request = _engine_request("0", Request(0, prompt, 5))
        request._block_hasher = get_request_block_hasher(16, sha256)
        request.update_block_hashes()
        scheduler.add_request(request)
        cached = set()
        while request.num_computed_tokens < prompt and scheduler.schedule().num_scheduled_tokens:
            for block in mamba.req_to_blocks["0"]:
                if block.block_hash is not None:
                    cached.add(block.block_hash_num_tokens)
        plan = plan_prefill(chunk_rule(scheduler, vllm.__version__), prompt)
        assert plan.checkpoints == sorted(cached), (plan, plan.rule)
        inside += len(plan.checkpoints) > len(plan.chunks)
    assert inside > 5


def test_a_shared_prefix_stops_on_its_block() -> None:
    plan = plan_prefill(ChunkRule(BLOCK, 8192), 11_000, shared_prefix_boundary=7000)
    assert plan.chunks == [6912, 3456, 632]


def test_a_million_tokens_are_two_runs() -> None:
    plan = plan_prefill(ChunkRule(BLOCK, 2048), 1 << 20)
    assert len(plan.chunks.runs) == 2
    assert plan.chunks == [BLOCK] * 910 + [256]
    assert plan.chunks != [BLOCK] * 910 + [256.5]
    assert plan.chunks[-1] == 256
    assert plan.chunks[909:] == [BLOCK, 256]
    assert plan.chunks.num_tokens == 1 << 20
    assert json.loads(json.dumps(list(plan.chunks)))[0] == BLOCK
    with pytest.raises(IndexError):
        plan.chunks[911]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_prompt_tokens": 0}, "num_prompt_tokens = 0 must be at least 1"),
        ({"num_computed_tokens": 100}, "num_computed_tokens = 100 must be from 0 to"),
        ({"num_computed_tokens": -1}, "num_computed_tokens = -1"),
        ({"decode_tokens": -1}, "decode_tokens = -1 must be at least 0"),
        ({"decode_tokens": 4, "decode_requests": 5}, "decode_requests = 5 must be from 1 to"),
        ({"decode_tokens": 4, "decode_requests": 0}, "decode_requests = 0 must be from 1 to"),
        ({"shared_prefix_boundary": -1}, "shared_prefix_boundary = -1 must be at least 0"),
    ],
)
def test_bad_values_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(PlannerError) as error:
        plan_prefill(ChunkRule(BLOCK, 2048), **{"num_prompt_tokens": 100, **arguments})
    assert message in str(error.value)


@st.composite
def rules(draw: st.DrawFn) -> ChunkRule:
    block = draw(st.sampled_from([16, 48, 64, 100]))
    budget = draw(st.integers(1, 6 * block))
    version = draw(st.sampled_from(SUPPORTED_VERSIONS))
    unit = draw(st.sampled_from([block, block // 4]))
    drop = draw(st.booleans())
    return ChunkRule(
        block,
        budget,
        version,
        max_num_scheduled_tokens=draw(st.none() | st.integers(1, budget)),
        long_prefill_token_threshold=draw(st.just(0) | st.integers(1, 3 * block)),
        draft_slots=draw(st.sampled_from([0, 0, 1, 3])),
        hash_block_size=unit,
        eagle_block_drop=drop,
        hash_lookahead_tokens=0 if drop or version != "0.33" else draw(st.integers(0, 3)),
        checkpoint_alignment=draw(st.sampled_from([None, 1, 4])),
        partial_hits=unit < block and draw(st.booleans()),
        prefill_lookahead_tokens=draw(st.integers(0, 3)),
    )


@st.composite
def prompts(draw: st.DrawFn) -> dict[str, int]:
    prompt = draw(st.integers(1, 1500))
    decode_tokens = draw(st.integers(0, 40))
    return {
        "num_prompt_tokens": prompt,
        "num_computed_tokens": draw(st.integers(0, prompt - 1)),
        "decode_tokens": decode_tokens,
        "decode_requests": draw(st.integers(1, decode_tokens)) if decode_tokens else 0,
        "shared_prefix_boundary": draw(st.just(0) | st.integers(1, prompt)),
    }


def walk(rule: ChunkRule, prompt: dict[str, int]) -> list[int]:
    """The plan without its arithmetic: one split after the other."""
    room = room_tokens(rule, prompt["decode_tokens"], prompt["decode_requests"])
    room = min(room, rule.threshold(1 + prompt["decode_requests"]) or room)
    start, total = prompt["num_computed_tokens"], prompt["num_prompt_tokens"]
    chunks = []
    while start < total and room > 0:
        wanted = min(room, total - start)
        split = rule.split(start, wanted, total, None, prompt["shared_prefix_boundary"])
        got = rule.reserve(total - start, split)
        if not got:
            break
        chunks.append(got)
        start += got
    return chunks


@settings(max_examples=400, deadline=None)
@given(rules(), prompts())
def test_plans_are_the_walk_and_conserve_tokens(rule: ChunkRule, prompt: dict[str, int]) -> None:
    plan = plan_prefill(rule, **prompt)
    assert plan.chunks == walk(rule, prompt)
    missing = prompt["num_prompt_tokens"] - prompt["num_computed_tokens"]
    assert (sum(plan.chunks) == missing) == (plan.stalled is None)
    assert all(chunk > 0 for chunk in plan.chunks)


@settings(max_examples=400, deadline=None)
@given(rules(), prompts())
def test_chunk_ends_are_legal(rule: ChunkRule, prompt: dict[str, int]) -> None:
    """All but the last end on the grid, at a state to keep, inside a block that no chunk can span,
    or short of the lookahead."""
    plan = plan_prefill(rule, **prompt)
    end, total = prompt["num_computed_tokens"], prompt["num_prompt_tokens"]
    cap = min(rule.scheduled_budget, rule.long_prefill_token_threshold or rule.scheduled_budget)
    for chunk in plan.chunks:
        start, end = end, end + chunk
        assert (
            end == total
            or rule.caches_state(end, total, prompt["shared_prefix_boundary"])
            or (end - start - 1 < rule.block_size and rule.block_size > cap)
            or total - end == rule.prefill_lookahead_tokens
            # the stop for a shared prefix counts whole blocks from where the chunk starts
            or (prompt["shared_prefix_boundary"] >= end and chunk % rule.block_size == 0)
        )


@settings(max_examples=300, deadline=None)
@given(rules(), prompts())
def test_idle_reasons_sum_to_what_was_left(rule: ChunkRule, prompt: dict[str, int]) -> None:
    plan = plan_prefill(rule, **prompt)
    decode_tokens, requests = prompt["decode_tokens"], prompt["decode_requests"]
    left = sum(
        max(
            0,
            min(
                rule.scheduled_budget - decode_tokens - chunk,
                rule.max_num_batched_tokens
                - decode_tokens
                - chunk
                - rule.draft_slots * (requests + 2),
            ),
        )
        for chunk in plan.chunks
    )
    assert sum(plan.idle_tokens.values()) + plan.no_work_tokens == left
    assert all(tokens > 0 for tokens in plan.idle_tokens.values())


@settings(max_examples=300, deadline=None)
@given(rules(), prompts())
def test_a_lone_plan_is_a_schedule_of_one(rule: ChunkRule, prompt: dict[str, int]) -> None:
    names = ("num_prompt_tokens", "num_computed_tokens", "shared_prefix_boundary")
    lone = {name: prompt[name] for name in names}
    plan = plan_prefill(rule, **lone)
    schedule = plan_schedule(rule, [Request(0, num_output_tokens=1, **lone)], max_num_seqs=1)
    assert plan.chunks == [got for step in schedule.steps for _, got in step.values()]
    assert plan.stall == schedule.stall
    assert plan.no_work_tokens == sum(schedule.no_work_tokens)
    summed: dict[str, int] = {}
    for idle in schedule.idle_tokens:
        for reason, tokens in idle.items():
            summed[reason] = summed.get(reason, 0) + tokens
    assert plan.idle_tokens == summed


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SUPPORTED_VERSIONS), st.integers(1, 400), st.integers(0, 400))
def test_more_budget_never_takes_longer_from_a_block_up(
    version: str, budget: int, more: int
) -> None:
    """Below one block it can: half a block a step takes 2 steps a block, as does a block less one
    token, and the rule with draft slots, a threshold or the lookahead has cliffs of its own."""
    block = 64
    small = plan_prefill(ChunkRule(block, block + budget, version), 5000)
    large = plan_prefill(ChunkRule(block, block + budget + more, version), 5000)
    assert large.tokens_per_step >= small.tokens_per_step
    assert large.steps <= small.steps
