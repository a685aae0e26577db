"""KV cache bytes per token and attention layer on one rank, and the dtype "auto" stands for.

Follows `FullAttentionSpec` / `MLAAttentionSpec` (vllm/v1/kv_cache_interface.py), the backends'
`customize_spec`, and `resolve_kv_cache_dtype_string` (vllm/utils/torch_utils.py).
"""

from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from chunk_planner.errors import PlannerError
from chunk_planner.geometry.settings import DTYPE_BYTES, EngineSettings
from chunk_planner.geometry.states import split
from chunk_planner.models.config import ModelConfig

_ALIASES = {"half": "float16", "float": "float32"}
_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")
_NVFP4 = ("nvfp4", "nvfp4_4over6")
_DS_MLA = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_PER_TOKEN_HEAD = ("int4_per_token_head", "int8_per_token_head", "fp8_per_token_head")
# bits of a key and of a value element; 8 is a plain fp8 key
_TURBOQUANT = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
_ULTRAQUANT = "ultraquant_4bit"
_ULTRAQUANT_GROUP = 32
KV_CACHE_DTYPES = (
    "auto",
    "float16",
    "bfloat16",
    *_FP8,
    *_DS_MLA,
    *_TURBOQUANT,
    _ULTRAQUANT,
    *_PER_TOKEN_HEAD,
    *_NVFP4,
)


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


def model_dtype(config: ModelConfig, settings: EngineSettings) -> str:
    """The dtype weights and activations run in. A float32 checkpoint is served in bfloat16."""
    if settings.dtype != "auto":
        return _ALIASES.get(settings.dtype, settings.dtype)
    for part in (config.root, config.text, config.root.get("vision_config") or {}):
        found = part.get("dtype") or part.get("torch_dtype")
        if found:
            found = _ALIASES.get(str(found).removeprefix("torch."), str(found))
            found = found.removeprefix("torch.")
            if found not in DTYPE_BYTES:
                raise config.error("dtype", f"= {found!r} is not one of {', '.join(DTYPE_BYTES)}")
            return "bfloat16" if found == "float32" else found
    return "bfloat16"


def is_mla(config: ModelConfig) -> bool:
    """Whether attention keeps one latent vector per token (multi-head latent attention)."""
    return config.get("kv_lora_rank") is not None


def is_sparse(config: ModelConfig) -> bool:
    """Whether the attention reads only the tokens an indexer picks (DSA)."""
    return config.get("index_topk") is not None


def attention(config: ModelConfig, settings: EngineSettings, backend: str) -> Attention:
    """The attention cache of `config`; `backend` is vLLM's name of the attention backend.

    Raises:
        PlannerError: a dtype vLLM does not have, or heads the ranks cannot share.
    """
    dtype, notes = _resolve_dtype(config, settings, backend)
    if is_mla(config):
        return _mla(config, settings, dtype, notes)
    return _gqa(config, settings, dtype, notes)


def _resolve_dtype(
    config: ModelConfig, settings: EngineSettings, backend: str
) -> tuple[str, tuple[str, ...]]:
    asked = _ALIASES.get(settings.kv_cache_dtype, settings.kv_cache_dtype)
    if asked not in KV_CACHE_DTYPES:
        raise PlannerError(f"kv_cache_dtype = {asked!r} is not one of {', '.join(KV_CACHE_DTYPES)}")
    if asked == _ULTRAQUANT and settings.release < (0, 32):
        raise PlannerError(f"kv_cache_dtype = {asked!r} came with vLLM 0.32")
    notes: list[str] = []
    if asked == "auto":
        asked = _checkpoint_dtype(config)
        if asked != "auto":
            notes.append(f"the checkpoint asks for an {asked} KV cache, which 'auto' follows")
    sm100_glm = (
        settings.release >= (0, 33)
        and settings.device.capability[0] == 10
        and config.architecture.startswith("Glm5Next")
        and is_sparse(config)
    )
    if asked == "auto" and sm100_glm:
        asked = "fp8"
        notes.append("vLLM 0.33 keeps this model's KV cache in fp8 on SM10x unless told otherwise")
    # The sparse MLA backends store quantized tokens in a record of their own.
    packed = (backend == "FLASHMLA_SPARSE" and asked in _FP8) or (
        backend == "FLASHINFER_MLA_SPARSE_SM120" and asked in ("auto", "fp8", "fp8_e4m3")
    )
    if packed:
        notes.append(f"{backend} stores {asked} as fp8_ds_mla")
        asked = "fp8_ds_mla"
    return asked, tuple(notes)


def quantization(config: ModelConfig) -> dict[str, Any]:
    """The checkpoint's `quantization_config`; empty where it has none."""
    return replace(config, text=config.root).mapping("quantization_config")


def _checkpoint_dtype(config: ModelConfig) -> str:
    """What `quantization_config` says about the KV cache, as vLLM reads it; else "auto"."""
    quant = quantization(config)
    method = str(quant.get("quant_method", "")).lower().replace("_", "-")
    inner = quant.get("quantization") if isinstance(quant.get("quantization"), dict) else quant
    producer = quant.get("producer")
    if not method and isinstance(producer, dict) and producer.get("name") == "modelopt":
        method = "modelopt"
    if method.startswith("modelopt"):
        scheme = (
            inner.get("kv_cache_scheme")
            or quant.get("kv_cache_scheme")
            or inner.get("kv_cache_quant_algo")
            or quant.get("kv_cache_quant_algo")
        )
        if isinstance(scheme, dict):
            bits, kind = scheme.get("num_bits"), scheme.get("type")
            if bits == 8 and kind == "float" and scheme.get("dynamic") is False:
                return "fp8_e4m3"
            return "nvfp4" if bits == 4 and kind == "float" else "auto"
        return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(str(scheme).lower(), "auto")
    if not quant:
        quant = config.mapping("quantization_config")
        method = str(quant.get("quant_method", "")).lower().replace("_", "-")
    if method == "compressed-tensors" and quant.get("kv_cache_scheme") and not is_mla(config):
        return "fp8"
    return "auto"


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
    if dtype in _TURBOQUANT or dtype == _ULTRAQUANT:
        raise PlannerError(f"kv_cache_dtype = {dtype!r} needs K and V heads; {config.name} has MLA")
    size = _element_bytes(dtype, config, settings)
    sizing = page = head * size
    words = f"1 latent x ({rank} + {rope} rope) x {size} B"
    if dtype in _NVFP4:
        sizing = page = head // 2 + head // 16
        words = f"{head}/2 packed + {head}/16 scales"
        notes += (f"no MLA backend of vLLM {settings.vllm_version} takes {dtype}",)
    elif dtype in _PER_TOKEN_HEAD:
        page = (head // 2 if dtype.startswith("int4") else head) + 8
    elif dtype in _DS_MLA:
        page = _DS_MLA[dtype]
    return Attention(dtype, True, head, 1, sizing, page, words, notes)


def _gqa(
    config: ModelConfig, settings: EngineSettings, dtype: str, notes: tuple[str, ...]
) -> Attention:
    if dtype in _DS_MLA:
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
    if dtype in _NVFP4:
        per_head = 2 * (head // 2 + head // 16)
        words = f"2 x ({head}/2 packed + {head}/16 scales)"
    elif dtype in _PER_TOKEN_HEAD:
        data = head if dtype.startswith("int4") else 2 * head
        per_head, words = data + 8, f"({data} data + 8 scales)"
    elif dtype in _TURBOQUANT:
        per_head = _turboquant_slot(head, *_TURBOQUANT[dtype])
        words = f"{per_head} B {dtype} slot"
    elif dtype == _ULTRAQUANT:
        per_head = 2 * (head // 2 + head // _ULTRAQUANT_GROUP)
        words = f"2 x ({head}/2 packed + {head}/{_ULTRAQUANT_GROUP} scales)"
    page = sizing = heads * per_head
    words = f"{heads} KV heads x {words}"
    skip = 0
    if settings.kv_cache_dtype_skip_layers and size == 1:
        skip = heads * 2 * head * DTYPE_BYTES[model_dtype(config, settings)]
        if dtype in _TURBOQUANT or dtype == _ULTRAQUANT:
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
