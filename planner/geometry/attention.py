"""KV cache bytes per token and attention layer on one rank.

Follows `FullAttentionSpec` and `MLAAttentionSpec` (vllm/v1/kv_cache_interface.py) and the
backends' `customize_spec`.
"""

from dataclasses import dataclass
from math import lcm

from chunk_planner.errors import PlannerError
from chunk_planner.geometry.kv_dtype import (
    DS_MLA,
    NVFP4,
    PER_TOKEN_HEAD,
    TURBOQUANT,
    ULTRAQUANT,
    ULTRAQUANT_GROUP,
    is_mla,
    model_dtype,
)
from chunk_planner.geometry.settings import DTYPE_BYTES, EngineSettings
from chunk_planner.geometry.state import split
from chunk_planner.models.config import ModelConfig


@dataclass(frozen=True)
class Attention:
    """One attention layer's cache on one rank, in bytes per token.

    Attributes:
        kv_cache_dtype: after "auto" and the backend's own format are resolved.
        sizing_bytes: what vLLM sizes the block by.
        page_bytes: what a token takes in the cache.
        skip_bytes: what it takes in a layer of `--kv-cache-dtype-skip-layers`; 0 without any.
        words: how `sizing_bytes` came about.
        notes: what the reader should know about the dtype.
    """

    kv_cache_dtype: str
    is_mla: bool
    head_size: int
    kv_heads: int
    sizing_bytes: int
    page_bytes: int
    words: str
    notes: tuple[str, ...] = ()
    skip_bytes: int = 0


def attention(
    config: ModelConfig, settings: EngineSettings, dtype: str, notes: tuple[str, ...] = ()
) -> Attention:
    """The attention cache of `config` stored as `dtype`; `notes` are kept with it.

    Raises:
        PlannerError: a dtype the model's attention has no use for, or heads the ranks cannot
            share.
    """
    if is_mla(config):
        return _mla(config, settings, dtype, notes)
    return _gqa(config, settings, dtype, notes)


def _element_bytes(dtype: str, config: ModelConfig, settings: EngineSettings) -> int:
    if dtype == "auto":
        return DTYPE_BYTES[model_dtype(config, settings)]
    return DTYPE_BYTES.get(dtype, 1)


def _mla(
    config: ModelConfig, settings: EngineSettings, dtype: str, notes: tuple[str, ...]
) -> Attention:
    split(
        config,
        "num_attention_heads",
        config.integer("num_attention_heads"),
        settings.tensor_parallel_size,
    )
    if settings.kv_cache_dtype_skip_layers:
        raise PlannerError(f"kv_cache_dtype_skip_layers: {config.name} has MLA, not modelled")
    rank = config.integer("kv_lora_rank")
    rope = config.integer("qk_rope_head_dim", 0, minimum=0)
    head = rank + rope
    if dtype in TURBOQUANT or dtype == ULTRAQUANT:
        raise PlannerError(f"kv_cache_dtype = {dtype!r} needs K and V heads; {config.name} has MLA")
    size = _element_bytes(dtype, config, settings)
    sizing = page = head * size
    words = f"1 latent x ({rank} + {rope} rope) x {size} B"
    if dtype in NVFP4:
        sizing = page = head // 2 + head // 16
        words = f"{head}/2 packed + {head}/16 scales"
        notes += (f"no MLA backend of vLLM {settings.vllm_version} takes {dtype}",)
    elif dtype in PER_TOKEN_HEAD:
        page = (head // 2 if dtype.startswith("int4") else head) + 8
    elif dtype in DS_MLA:
        page = DS_MLA[dtype]
    return Attention(dtype, True, head, 1, sizing, page, words, notes)


def _gqa(
    config: ModelConfig, settings: EngineSettings, dtype: str, notes: tuple[str, ...]
) -> Attention:
    if dtype in DS_MLA:
        raise PlannerError(f"kv_cache_dtype = {dtype!r} is for MLA models; {config.name} has none")
    tp = settings.tensor_parallel_size
    total_heads = config.integer("num_attention_heads")
    split(config, "num_attention_heads", total_heads, tp)
    kv_total = config.first("n_head_kv", "num_kv_heads", "num_key_value_heads", default=total_heads)
    if max(kv_total, tp) % min(kv_total, tp):
        raise PlannerError(
            f"tensor_parallel_size = {tp} and the {kv_total} KV heads of {config.name} do not "
            "divide one another"
        )
    heads = max(1, kv_total // tp)
    head = head_size(config)
    size = _element_bytes(dtype, config, settings)
    per_head, words = 2 * head * size, f"2 x {head} x {size} B"
    if dtype in NVFP4:
        per_head = 2 * (head // 2 + head // 16)
        words = f"2 x ({head}/2 packed + {head}/16 scales)"
    elif dtype in PER_TOKEN_HEAD:
        data = head if dtype.startswith("int4") else 2 * head
        per_head, words = data + 8, f"({data} data + 8 scales)"
    elif dtype in TURBOQUANT:
        per_head = _turboquant_slot(head, *TURBOQUANT[dtype])
        words = f"{per_head} B {dtype} slot"
    elif dtype == ULTRAQUANT:
        per_head = 2 * (head // 2 + head // ULTRAQUANT_GROUP)
        words = f"2 x ({head}/2 packed + {head}/{ULTRAQUANT_GROUP} scales)"
    page = sizing = heads * per_head
    words = f"{heads} KV heads x {words}"
    skip = 0
    if settings.kv_cache_dtype_skip_layers and size == 1:
        skip = heads * 2 * head * DTYPE_BYTES[model_dtype(config, settings)]
        if dtype in TURBOQUANT or dtype == ULTRAQUANT:
            sizing = lcm(page, skip)
            words += f", lcm with {skip} B of the skipped layers"
    return Attention(dtype, False, head, heads, sizing, page, words, notes, skip)


def _turboquant_slot(head: int, key_bits: int, value_bits: int) -> int:
    """Bytes of a packed K and V pair, made even (vLLM's `TurboQuantConfig`)."""
    key = head if key_bits == 8 else -(-head * key_bits // 8) + 2
    value = -(-head * value_bits // 8) + 4
    return key + value + (key + value) % 2


def head_size(config: ModelConfig) -> int:
    """Size of one attention head, by `ModelArchConfigConvertorBase.get_head_size`."""
    if config.architecture == "Zamba2ForCausalLM":
        # The shared attention sees the embedding beside the hidden state: twice the width.
        return config.integer("attention_head_dim", 0) or (
            2 * config.integer("hidden_size") // config.integer("num_attention_heads")
        )
    for name in ("head_dim", "attention_head_dim", "hidden_size_per_head"):
        found = config.integer(name, 0, minimum=0)
        if found:
            return found
    size = config.integer("hidden_size") // config.integer("num_attention_heads")
    if not size:
        raise config.error("hidden_size", "is smaller than num_attention_heads")
    return size
