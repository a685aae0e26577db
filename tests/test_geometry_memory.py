"""KV left, the weights behind it, and vLLM's default budgets."""

import json

import pytest

from chunk_planner.errors import PlannerError
from chunk_planner.geometry import (
    EngineSettings,
    MemorySettings,
    default_budget,
    kv_left,
    resolve,
)
from chunk_planner.geometry.groups import kv_groups
from chunk_planner.geometry.memory import blocks_per_request
from chunk_planner.geometry.weights import weights

GIB = 2**30
GLM = EngineSettings(
    vllm_version="0.31",
    tensor_parallel_size=8,
    kv_cache_dtype="fp8",
    num_speculative_tokens=3,
    max_model_len=1048576,
)


def left(budget, **memory):
    return kv_left(resolve("GLM-5.3-Flash", GLM), MemorySettings(64 * GIB, **memory), budget)


def test_more_budget_leaves_less():
    rows = [left(budget) for budget in (2048, 4096, 8192, 12288, 16384)]
    kv = [row.kv_bytes for row in rows]
    assert kv == sorted(kv, reverse=True)
    assert len(set(kv)) == len(kv)
    assert all(row.evidence == "modelled" for row in rows)


def test_reported_activation_curve():
    """RTX 5090, 64-layer GDN (vLLM issue 52872): 2.84, 2.42, 2.32 GiB at 8192, 4096, 3072."""
    geometry = resolve("Qwen3.6-27B-NVFP4")
    memory = MemorySettings(32 * GIB)
    for budget, reported in ((8192, 2.84), (4096, 2.42), (3072, 2.32)):
        modelled = kv_left(geometry, memory, budget).activation_bytes / GIB
        assert modelled == pytest.approx(reported, rel=0.05)


def test_what_is_given_is_not_modelled():
    row = left(2048, weight_bytes=40 * GIB, activation_bytes_per_token=1000, graph_bytes=0)
    assert (row.weight_bytes, row.graph_bytes, row.evidence) == (40 * GIB, 0, "given")
    assert left(4096, activation_bytes_per_token=1000).activation_bytes - left(
        2048, activation_bytes_per_token=1000
    ).activation_bytes == pytest.approx(2048 * 1000)
    assert left(2048, enforce_eager=True).graph_bytes == 0


def test_no_memory_left_is_no_request():
    row = left(2048, weight_bytes=64 * GIB)
    assert (row.kv_bytes, row.num_blocks, row.kv_tokens, row.fits) == (0, 0, 0, False)


@pytest.mark.parametrize("spare", range(6))
def test_one_request_on_paper_does_not_fit(spare):
    """A pool of 1.00x to 1.01x starts and then stalls: the spare blocks are missing."""
    geometry = resolve("Qwen3.5-27B", EngineSettings(vllm_version="0.32", max_model_len=262144))
    groups = kv_groups(geometry)
    logged, needed = blocks_per_request(geometry, groups, 262144)
    blocks = logged + spare
    pool = blocks * groups.bytes_per_block
    fixed = kv_left(geometry, MemorySettings(10**12, weight_bytes=0), 1)
    taken = fixed.activation_bytes + fixed.graph_bytes
    row = kv_left(
        geometry,
        MemorySettings(taken + pool, gpu_memory_utilization=1.0, weight_bytes=0),
        1,
    )
    assert row.num_blocks == blocks
    assert row.concurrency >= 1
    # The null block, and one block for each group to grow by.
    assert row.fits == (spare >= 1 + groups.count)
    assert needed == logged + groups.count


def test_request_blocks_by_hand():
    """GLM, TP 8, fp8, k 3: 12 attention layers with MTP's, 34 of state, rings of the indexer."""
    geometry = resolve("GLM-5.3-Flash", GLM)
    groups = kv_groups(geometry)
    assert (groups.attention, groups.state, groups.fixed) == (1, 3, 1)
    assert groups.bytes_per_block == 12 * (1152 * 512 + 1152 // 4 * 132)
    logged, _ = blocks_per_request(geometry, groups, 1048576)
    assert logged == 911 + 3 * (2 + 3) + 1


def test_state_blocks_of_mid_chunk_export():
    on = resolve("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", EngineSettings(vllm_version="0.32"))
    off = resolve("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", EngineSettings(vllm_version="0.31"))
    assert (on.state_blocks_per_request, off.state_blocks_per_request) == (3, 2)
    assert (on.checkpoint_alignment, off.checkpoint_alignment) == (1, None)


def test_weights_from_index_files_or_config(tmp_path):
    source = resolve("Qwen3.5-27B").config.root
    (tmp_path / "config.json").write_text(json.dumps(source))
    two = EngineSettings(tensor_parallel_size=2)
    counted = weights(resolve(tmp_path, two))
    assert counted.source.startswith("modelled")
    assert counted.bytes == pytest.approx(27e9, rel=0.02)
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert weights(resolve(tmp_path, two)).bytes == 500
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 54000000000}}')
    found = weights(resolve(tmp_path, two))
    assert (found.bytes, found.source) == (27000000000, "safetensors index / 2 ranks")
    index.write_text("{}")
    with pytest.raises(PlannerError, match=r"total_size"):
        weights(resolve(tmp_path, two))


def test_counted_weights_of_a_published_checkpoint():
    """Kimi-K3's 96 files hold 1453.66 GB."""
    assert weights(resolve("Kimi-K3")).bytes == pytest.approx(1453.66e9, rel=0.03)


def test_weights_are_asked_for_where_they_cannot_be_counted():
    config = {k: v for k, v in resolve("Qwen3.5-27B").config.text.items() if k != "vocab_size"}
    geometry = resolve({**config, "architectures": ["Qwen3_5ForCausalLM"]})
    with pytest.raises(PlannerError, match="--weight-bytes"):
        weights(geometry)


@pytest.mark.parametrize(
    ("gib", "context", "version", "device", "expected"),
    [
        (64, "server", "0.31", None, (2048, 256)),
        (64, "llm", "0.31", None, (8192, 256)),
        (80, "server", "0.33", "NVIDIA H100 80GB HBM3", (8192, 1024)),
        (80, "llm", "0.33", "NVIDIA H100 80GB HBM3", (16384, 1024)),
        (80, "server", "0.33", "NVIDIA A100-SXM4-80GB", (2048, 256)),
        (180, "server", "0.30", "NVIDIA B200", (16384, 1024)),
        (119, "server", "0.32", "NVIDIA GB10", (8192, 1024)),
        (119, "server", "0.33", "NVIDIA GB10", (2048, 256)),
        (80, "none", "0.33", None, (2048, 128)),
        (64, "server", "0.33", "cpu", (2048, 128)),
    ],
)
def test_default_budgets(gib, context, version, device, expected):
    found = default_budget(gib * GIB, context, version, device_name=device)
    assert found[:2] == expected
    assert version in found.reason


def test_default_budget_details():
    assert default_budget(64 * GIB, "llm", "0.33", device_name="cpu", world_size=4)[:2] == (
        16384,
        1024,
    )
    fast = default_budget(64 * GIB, performance_mode="throughput")
    assert fast[:2] == (4096, 512)
    assert default_budget(80 * GIB, max_model_len=4)[:2] == (4096, 1024)
    assert default_budget(64 * GIB, max_model_len=1)[:2] == (256, 256)
    long = default_budget(64 * GIB, max_model_len=9000, enable_chunked_prefill=False)
    assert long.max_num_batched_tokens == 9000
    with pytest.raises(PlannerError, match="usage_context = 'web'"):
        default_budget(64 * GIB, "web")


@pytest.mark.parametrize(
    ("field", "value"),
    [("gpu_memory_utilization", 1.5), ("total_device_bytes", 0), ("weight_bytes", -1)],
)
def test_memory_settings_name_the_field(field, value):
    with pytest.raises(PlannerError, match=f"{field} = {value}"):
        MemorySettings(**{"total_device_bytes": 64 * GIB, field: value})
