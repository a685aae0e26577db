"""The dtypes of a model and of its KV cache, with what "auto" stands for.

Follows `resolve_kv_cache_dtype_string` (vllm/utils/torch_utils.py), the attention layers'
constructors, and the models' hooks (vllm/model_executor/models/config.py).
"""

from dataclasses import replace
from typing import Any

from chunk_planner.errors import PlannerError
from chunk_planner.geometry.settings import DTYPE_BYTES, EngineSettings
from chunk_planner.models.config import ModelConfig

_ALIASES = {"half": "float16", "float": "float32"}
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")
NVFP4 = ("nvfp4", "nvfp4_4over6")
DS_MLA = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
PER_TOKEN_HEAD = ("int4_per_token_head", "int8_per_token_head", "fp8_per_token_head")
# bits of a key and of a value element; 8 is a plain fp8 key
TURBOQUANT = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
ULTRAQUANT = "ultraquant_4bit"
ULTRAQUANT_GROUP = 32
KV_CACHE_DTYPES = (
    "auto",
    "float16",
    "bfloat16",
    *FP8,
    *DS_MLA,
    *TURBOQUANT,
    ULTRAQUANT,
    *PER_TOKEN_HEAD,
    *NVFP4,
)


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


def requested_kv_cache_dtype(
    config: ModelConfig, settings: EngineSettings
) -> tuple[str, tuple[str, ...]]:
    """The flag, or what the checkpoint and the model's own hook make of "auto", and notes.

    Raises:
        PlannerError: a dtype the release does not have.
    """
    asked = _ALIASES.get(settings.kv_cache_dtype, settings.kv_cache_dtype)
    if asked not in KV_CACHE_DTYPES:
        raise PlannerError(f"kv_cache_dtype = {asked!r} is not one of {', '.join(KV_CACHE_DTYPES)}")
    if asked == ULTRAQUANT and settings.release < (0, 32):
        raise PlannerError(f"kv_cache_dtype = {asked!r} came with vLLM 0.32")
    if asked != "auto":
        return asked, ()
    asked = _checkpoint_dtype(config)
    if asked != "auto":
        return asked, (f"the checkpoint asks for an {asked} KV cache, which 'auto' follows",)
    sm100 = settings.device.platform == "cuda" and settings.device.capability[0] == 10
    if settings.release >= (0, 33) and sm100 and config.architecture.startswith("Glm5Next"):
        return "fp8", ("vLLM 0.33 keeps this model's KV cache in fp8 on SM10x",)
    return "auto", ()


def stored_kv_cache_dtype(asked: str, backend: str) -> tuple[str, tuple[str, ...]]:
    """What `backend` stores: the sparse MLA backends have a record of their own for fp8."""
    packed = (backend == "FLASHMLA_SPARSE" and asked in FP8) or (
        backend == "FLASHINFER_MLA_SPARSE_SM120" and asked in ("auto", "fp8", "fp8_e4m3")
    )
    if packed:
        return "fp8_ds_mla", (f"{backend} stores {asked} as fp8_ds_mla",)
    return asked, ()


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
