"""KV cache groups, concurrency and default budgets against the installed vLLM's own."""

from types import SimpleNamespace as Namespace
from unittest import mock

import pytest

from chunk_planner.geometry import EngineSettings, default_budget, resolve
from chunk_planner.geometry.groups import kv_groups, mtp_layers
from chunk_planner.geometry.memory import blocks_per_request
from chunk_planner.rule import find_release

pytestmark = pytest.mark.engine
vllm = pytest.importorskip("vllm")

VERSION = find_release(vllm.__version__).version
FALCON_H1 = {
    "architectures": ["FalconH1ForCausalLM"],
    "dtype": "bfloat16",
    "num_hidden_layers": 4,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "mamba_d_ssm": 4096,
    "mamba_n_heads": 64,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
}


def layer_specs(geometry):
    """vLLM's specs of every layer of `geometry`, by layer name."""
    import torch
    from vllm.v1 import kv_cache_interface as kv

    g = geometry
    k, kpool = g.num_speculative_tokens, g.config.integer("index_kpool", 1)
    padded = g.page_bytes if g.page_bytes > g.state_bytes_per_layer else None
    state = kv.MambaSpec(
        block_size=g.block_size,
        shapes=((g.state_bytes_per_layer,),),
        dtypes=(torch.int8,),
        page_size_padded=padded,
        mamba_cache_mode="align",
        num_speculative_blocks=k,
        num_prefill_checkpoint_blocks=g.checkpoint_blocks,
    )
    cls = kv.MLAAttentionSpec if g.attention.is_mla else kv.FullAttentionSpec
    attention = cls(
        block_size=g.block_size,
        num_kv_heads=g.attention.kv_heads,
        head_size=g.attention.head_size,
        dtype=torch.int8,
        state_content_bytes=g.attention.page_bytes // g.attention.kv_heads,
    )
    specs = {f"state.{i}": state for i in range(g.mamba_layers)}
    for i in range(g.attention_layers + mtp_layers(g)):
        specs[f"attention.{i}"] = attention
        if g.config.get("index_topk") is not None:
            specs[f"indexer.{i}"] = kv.MLAAttentionSpec(
                block_size=g.block_size,
                num_kv_heads=1,
                head_size=g.config.integer("index_head_dim") + 4,
                dtype=torch.uint8,
                cache_role=kv.SparseCacheRole.INDEXER,
                tokens_per_state=kpool,
            )
            specs[f"ring.{i}"] = kv.CircularBufferSpec(
                block_size=2 * kpool,
                num_kv_heads=2,
                head_size=g.config.integer("index_head_dim"),
                head_size_v=0,
                dtype=torch.bfloat16,
            )
    return specs


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize(
    "model",
    ["GLM-5.3-Flash", "Qwen3.5-27B", "Qwen3-Next-80B-A3B", "Kimi-K3", FALCON_H1],
    ids=lambda model: "Falcon-H1" if isinstance(model, dict) else model,
)
def test_groups_and_concurrency(model, k):
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_layout import KVCacheLayout

    length = 262144
    settings = EngineSettings(
        vllm_version=VERSION,
        num_speculative_tokens=k,
        max_model_len=length,
        tensor_parallel_size=4,
        kv_cache_dtype="fp8",
        device_name="H100",
    )
    geometry = resolve(model, settings)
    sparse = geometry.config.get("index_topk") is not None
    layout = KVCacheLayout.BLHNC if sparse else KVCacheLayout.LBHNC
    config = mock.MagicMock()
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.cache_config.get_resolved_kv_cache_layout.return_value = layout
    config.cache_config.mamba_cache_mode = "align"
    config.attention_config.hisparse_config = None
    config.speculative_config = None
    config.model_config.max_model_len = length
    config.parallel_config.decode_context_parallel_size = 1
    groups = kv_cache_utils.get_kv_cache_groups(config, layer_specs(geometry))
    found = kv_groups(geometry)
    assert found.count == len(groups)
    assert found.bytes_per_block == kv_cache_utils._pool_bytes_per_block(config, groups)
    pool = Namespace(num_blocks=10000, kv_cache_groups=groups)
    wanted = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, pool)
    logged, _ = blocks_per_request(geometry, found, length)
    assert 10000 / logged == wanted


@pytest.mark.parametrize("gib", [24, 64, 80, 180])
@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"])
def test_default_budgets_are_vllms(gib, name):
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    platform = mock.MagicMock()
    platform.get_device_total_memory.return_value = gib * 2**30
    platform.get_device_name.return_value = name
    platform.is_tpu.return_value = platform.is_cpu.return_value = False
    platform.is_device_capability.return_value = False
    with mock.patch.object(arg_utils, "current_platform", platform):
        tokens, seqs = arg_utils.EngineArgs.get_batch_defaults(1)
    contexts = {"server": UsageContext.OPENAI_API_SERVER, "llm": UsageContext.LLM_CLASS}
    for context, theirs in contexts.items():
        found = default_budget(gib * 2**30, context, VERSION, device_name=name)
        assert found[:2] == (tokens[theirs], seqs[theirs])
