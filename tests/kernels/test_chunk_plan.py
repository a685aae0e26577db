"""The step planned on the device against its reference and against `chunk_planner.batch`."""

import random
from dataclasses import fields, replace

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from chunk_planner import batch  # noqa: E402
from chunk_planner.kernels.chunk_metadata import (  # noqa: E402
    ChunkMetadata,
    chunk_metadata,
    chunk_metadata_reference,
    max_chunks,
)
from chunk_planner.kernels.chunk_plan import plan_step  # noqa: E402
from chunk_planner.kernels.plan_reference import plan_step_reference  # noqa: E402
from chunk_planner.kernels.step_tensors import StepTensors  # noqa: E402
from chunk_planner.rule import ChunkRule  # noqa: E402

PLAIN = ChunkRule(block_size=1152, max_num_batched_tokens=8192)
# One factor at a time around the plain rule.
RULES = {
    "plain": PLAIN,
    "two_budgets": replace(PLAIN, max_num_scheduled_tokens=7000),
    "block_over_budget": replace(PLAIN, block_size=2096, max_num_batched_tokens=2048),
    "budget_is_block": replace(PLAIN, max_num_batched_tokens=1152),
    "draft_slots": replace(PLAIN, draft_slots=3),
    "threshold": replace(PLAIN, long_prefill_token_threshold=1500),
    "threshold_below_block": replace(PLAIN, long_prefill_token_threshold=500),
    "adaptive": replace(
        PLAIN, long_prefill_token_threshold=64, long_prefill_token_threshold_adaptive=True
    ),
    "threshold_0_30": replace(PLAIN, vllm_version="0.30", long_prefill_token_threshold=1500),
    "block_drop": replace(PLAIN, eagle_block_drop=True),
    "hash_lookahead": replace(PLAIN, hash_lookahead_tokens=3),
    "exports": replace(PLAIN, checkpoint_alignment=1),
    "exports_aligned": replace(PLAIN, checkpoint_alignment=64, hash_block_size=64),
    "exports_0_30_drop": replace(
        PLAIN, vllm_version="0.30", checkpoint_alignment=16, eagle_block_drop=True
    ),
    "partial_hits": replace(PLAIN, hash_block_size=64, partial_hits=True),
    "partial_hits_0_31": replace(PLAIN, vllm_version="0.31", hash_block_size=64, partial_hits=True),
    "junction_checkpoint": replace(
        PLAIN, hash_block_size=16, partial_hits=True, shared_prefix_checkpoint=True
    ),
    "multi_module_mtp": replace(PLAIN, prefill_lookahead_tokens=3),
    "multi_module_mtp_0_32": replace(PLAIN, vllm_version="0.32", prefill_lookahead_tokens=3),
}


def random_step(rng: random.Random, rule: ChunkRule, num_requests: int, prefills: float):
    """Rows of computed, tokens, prompt, drafts, junction, and how many of them run."""
    block = rule.block_size
    rows = []
    for _ in range(num_requests):
        prompt = rng.choice([rng.randrange(1, 6 * block), block * rng.randrange(1, 5)])
        tokens = prompt + rng.choice([0, rng.randrange(50)])
        start = tokens - 1
        if rng.random() < prefills:
            whole_blocks = block * rng.randrange(1 + tokens // block)
            start = min(rng.choice([0, rng.randrange(tokens), whole_blocks]), tokens - 1)
        junction = rng.choice([0, rng.randrange(prompt + 60)])
        rows.append((start, tokens, prompt, rng.choice([0, 1, 3]), junction))
    return np.array(rows, np.int32).reshape(-1, 5), rng.randrange(num_requests + 1)


def poisoned(num_requests: int, device: str) -> StepTensors:
    out = StepTensors.empty(num_requests, device)
    for field in fields(out):
        getattr(out, field.name).fill_(True if "is_" in field.name else -(2**31) + 7)
    return out


def run_on(run, device: str, rule, rows, num_running: int, slots=None) -> StepTensors:
    columns = [torch.from_numpy(column.copy()).to(device) for column in rows.T]
    waiting = torch.arange(len(rows), device=device) >= num_running
    out = poisoned(len(rows), device)
    return run(
        rule, *columns[:4], waiting, out, shared_prefix_boundary=columns[4], max_num_seqs=slots
    )


def assert_equal(actual: StepTensors, expected: StepTensors) -> None:
    for field in fields(actual):
        if field.name != "workspace":
            left, right = getattr(actual, field.name), getattr(expected, field.name)
            assert left.tolist() == right.tolist(), field.name


def assert_equals_batch(actual: StepTensors, rule, rows, num_running: int, slots=None) -> None:
    step = batch.plan_step(
        rule,
        *rows.T[:4],
        np.arange(len(rows)) >= num_running,
        shared_prefix_boundary=rows.T[4],
        max_num_seqs=slots,
    )
    for field in fields(step):
        assert getattr(actual, field.name).tolist() == getattr(step, field.name).tolist()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_kernel_matches_reference_and_batch(rule: ChunkRule, device: str) -> None:
    rng = random.Random(str(rule))
    for prefills in (0.2, 0.7, 1.0):
        for _ in range(2):
            rows, num_running = random_step(rng, rule, rng.randrange(1, 20), prefills)
            slots = rng.choice([None, num_running, num_running + 1])
            actual = run_on(plan_step, device, rule, rows, num_running, slots)
            expected = run_on(plan_step_reference, device, rule, rows, num_running, slots)
            assert_equal(actual, expected)
            assert_equals_batch(actual, rule, rows, num_running, slots)


@pytest.mark.parametrize(
    ("version", "num_requests", "num_running", "prefills", "budget"),
    [
        ("0.30", 63, 50, 0.3, 8192),
        ("0.31", 1024, 1010, 0.02, 8192),
        ("0.32", 1024, 1024, 0.02, 700),  # the budget ends inside the decodes
        ("0.33", 1000, 990, 0.0, 16_384),
    ],
)
def test_wide_steps(version, num_requests, num_running, prefills, budget, device: str) -> None:
    rule = replace(PLAIN, vllm_version=version, max_num_batched_tokens=budget, draft_slots=1)
    rows, _ = random_step(random.Random(num_requests), rule, num_requests, prefills)
    actual = run_on(plan_step, device, rule, rows, num_running)
    assert_equals_batch(actual, rule, rows, num_running)


def test_reference_matches_batch_on_many_rules() -> None:
    rng = random.Random(11)
    for _ in range(2000):
        rule = replace(
            rng.choice(list(RULES.values())), max_num_batched_tokens=rng.randrange(1, 9000)
        )
        rows, num_running = random_step(rng, rule, rng.randrange(12), rng.random())
        actual = run_on(plan_step_reference, "cpu", rule, rows, num_running)
        assert_equals_batch(actual, rule, rows, num_running)


def test_padding_of_a_captured_graph_changes_nothing(device: str) -> None:
    rule = RULES["threshold"]
    rows, num_running = random_step(random.Random(5), rule, 9, 0.5)
    padded = np.concatenate([rows, np.zeros((7, 5), np.int32)])
    waiting = torch.zeros(16, dtype=torch.bool)
    waiting[num_running:9] = True
    columns = [torch.from_numpy(column.copy()).to(device) for column in padded.T]
    for run in (plan_step, plan_step_reference):
        out = poisoned(16, device)
        run(rule, *columns[:4], waiting.to(device), out, shared_prefix_boundary=columns[4])
        plain = run_on(plan_step_reference, device, rule, rows, num_running)
        assert out.num_scheduled_tokens.tolist() == plain.num_scheduled_tokens.tolist() + [0] * 7
        assert out.query_start_loc.tolist()[:10] == plain.query_start_loc.tolist()
        assert out.checkpoint_column.tolist()[9:] == [-1] * 7


@pytest.mark.parametrize("run", [plan_step, plan_step_reference])
def test_known_step(run, device: str) -> None:
    # A decode, a prompt's first chunk, and a final chunk that saves the state at 2304 from inside.
    rule = replace(PLAIN, checkpoint_alignment=16, max_num_batched_tokens=3500)
    rows = np.array(
        [(300, 301, 200, 0, 0), (0, 9000, 9000, 0, 0), (1152, 3460, 3460, 0, 0)], np.int32
    )
    out = run_on(run, device, rule, rows[[0, 2, 1]], 3)
    assert out.num_scheduled_tokens.tolist() == [1, 2308, 1152]
    assert out.chunk_end.tolist() == [301, 3460, 1152]
    assert out.query_start_loc.tolist() == [0, 1, 2309, 3461]
    assert out.has_initial_state.tolist() == [True, True, False]
    assert out.is_checkpoint.tolist() == [False, True, True]
    # 3460 tokens fill columns 0 to 3; the state at 3456 belongs to column 2.
    assert out.checkpoint_column.tolist() == [-1, 2, 0]
    assert out.checkpoint_offsets.tolist() == [0, 3456 - 1152, 0]


@pytest.mark.parametrize(
    ("rule", "rows", "num_running", "expected"),
    [
        # Three placeholders would cross the boundary at 1152: the lone token runs unpadded.
        (PLAIN, [(100, 101, 50, 3), (1149, 1150, 1150, 3)], 1, [4, 1]),
        # Too little room for the padded width: it waits.
        (replace(PLAIN, max_num_batched_tokens=7), [(9, 10, 5, 3), (20, 21, 15, 3)], 1, [4, 0]),
        # The lookahead reserve leaves the head of the queue nothing; that blocked before 0.33.
        (RULES["multi_module_mtp_0_32"], [(1151, 1154, 1154, 0), (0, 500, 500, 0)], 0, [0, 0]),
        (RULES["multi_module_mtp"], [(1151, 1154, 1154, 0), (0, 500, 500, 0)], 0, [0, 500]),
    ],
    ids=["padding_cut", "padding_waits", "reserve_blocks", "reserve_skips"],
)
@pytest.mark.parametrize("run", [plan_step, plan_step_reference])
def test_rare_turns(run, rule, rows, num_running, expected, device: str) -> None:
    rows = np.array([(*row, 0) for row in rows], np.int32)
    out = run_on(run, device, rule, rows, num_running)
    assert out.num_scheduled_tokens.tolist() == expected


def test_other_rules_are_refused_by_name(device: str) -> None:
    class ForkedRule:
        block_size = 16

    with pytest.raises(ValueError, match="ForkedRule cannot run on a device, it has no"):
        run_on(plan_step, device, ForkedRule(), np.zeros((2, 5), np.int32), 2)


@pytest.mark.parametrize("run", [plan_step, plan_step_reference])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": torch.zeros(3, dtype=torch.int32)}, "num_tokens is torch.int32 \\(3,\\)"),
        ({"is_waiting": torch.zeros(2, dtype=torch.int32)}, "is_waiting is torch.int32"),
        ({"num_prompt_tokens": torch.zeros(4, dtype=torch.int32)[::2]}, "not contiguous"),
        ({"out": StepTensors.empty(3, "cpu")}, "out.num_scheduled_tokens is"),
        (
            {"num_computed_tokens": torch.zeros(1025, dtype=torch.int32)},
            "1025 requests is too wide",
        ),
    ],
)
def test_bad_tensors_are_named(run, change: dict, message: str) -> None:
    arguments = {
        name: torch.zeros(2, dtype=torch.int32)
        for name in ("num_computed_tokens", "num_tokens", "num_prompt_tokens", "num_draft_tokens")
    }
    arguments |= {
        "is_waiting": torch.zeros(2, dtype=torch.bool),
        "out": StepTensors.empty(2, "cpu"),
    }
    with pytest.raises(ValueError, match=message):
        run(PLAIN, **{**arguments, **change})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
def test_a_captured_graph_replays_with_new_numbers() -> None:
    rng = random.Random(3)
    steps = [random_step(rng, PLAIN, 40, 0.4)[0] for _ in range(3)]
    columns = [torch.from_numpy(column.copy()).cuda() for column in steps[0].T]
    waiting = torch.arange(40, device="cuda") >= 30
    out = StepTensors.empty(40, "cuda")
    room = max_chunks(PLAIN.scheduled_budget, 40, 64)
    chunks = ChunkMetadata(
        chunk_indices=torch.empty(room, 2, dtype=torch.int32, device="cuda"),
        chunk_offsets=torch.empty(41, dtype=torch.int32, device="cuda"),
    )

    def step() -> None:
        plan_step(PLAIN, *columns[:4], waiting, out, shared_prefix_boundary=columns[4])
        chunk_metadata(out.query_start_loc, 64, chunks)

    step()  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for rows in steps:
        for column, values in zip(columns, rows.T, strict=True):
            column.copy_(torch.from_numpy(values.copy()))
        graph.replay()
        assert_equals_batch(out, PLAIN, rows, 30)
        expected = ChunkMetadata(
            chunk_indices=torch.empty(room, 2, dtype=torch.int32),
            chunk_offsets=torch.empty(41, dtype=torch.int32),
        )
        chunk_metadata_reference(out.query_start_loc.cpu(), 64, expected)
        assert chunks.chunk_indices.tolist() == expected.chunk_indices.tolist()
        assert chunks.chunk_offsets.tolist() == expected.chunk_offsets.tolist()
