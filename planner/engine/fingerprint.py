"""What a table must match: device, model geometry, parallelism, dtypes, backends, versions."""

import hashlib
import json
import os
import platform
from pathlib import Path

from chunk_planner.tables import model_name

#: What the cost of a step depends on in a model's config, as far as a config has it. Names and
#: paths are left out, so that a local copy of a model is the same model.
_GEOMETRY = (
    "architectures",
    "attn_type_list",
    "expand",
    "first_k_dense_replace",
    "head_dim",
    "hidden_size",
    "hybrid_override_pattern",
    "intermediate_size",
    "kv_lora_rank",
    "layer_types",
    "layers_block_type",
    "linear_attn_config",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "mamba_d_head",
    "mamba_d_state",
    "mamba_expand",
    "mamba_head_dim",
    "mamba_n_heads",
    "mamba_num_heads",
    "moe_intermediate_size",
    "n_groups",
    "n_routed_experts",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "q_lora_rank",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "ssm_state_size",
    "vocab_size",
)


def fingerprint(scheduler) -> dict:
    """The fingerprint of a live engine, as `chunk_planner.tables` compares it.

    Args:
        scheduler: a vLLM scheduler, built.
    """
    import torch
    from vllm import __version__ as vllm_version

    config = scheduler.vllm_config
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    return {
        "device_name": device_name(),
        # An expert layer waits for all data-parallel ranks; in a dense model's engine their number
        # is 1 again, as each rank is an engine of its own.
        "device_count": parallel.world_size_across_dp,
        "host_threads": _host_threads(),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "expert_parallel": bool(parallel.enable_expert_parallel),
        "model": model_name(str(model.model)),
        "geometry_hash": geometry_hash(model.hf_text_config),
        "weight_dtype": str(model.quantization or model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(cache.cache_dtype),
        "state_dtype": str(getattr(cache, "mamba_ssm_cache_dtype", "auto")),
        "block_size": cache.block_size,
        "attention_backend": _attention_backend(config),
        "linear_attention_backend": _linear_attention_backend(config),
        "enforce_eager": bool(model.enforce_eager),
        "speculative_decoding": _speculative_decoding(config.speculative_config),
        "vllm_version": vllm_version,
        "torch_version": torch.__version__,
        "triton_version": _version("triton"),
        "cuda_version": torch.version.cuda or "none",
    }


def device_name() -> str:
    """The accelerator's name, or the CPU's where the engine runs on it."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return current_platform.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def geometry_hash(hf_config) -> str:
    """First 16 hex digits of the SHA-256 over the geometry fields a config has."""
    found = {name: getattr(hf_config, name, None) for name in _GEOMETRY}
    text = json.dumps(
        {k: v for k, v in found.items() if v is not None}, sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _attention_backend(config) -> str:
    backend = config.attention_config.backend
    return "auto" if backend is None else backend.name


def _linear_attention_backend(config) -> str:
    """What the user asked for, or else the Mamba backend; every family has settings of its own."""
    extra = config.additional_config if isinstance(config.additional_config, dict) else {}
    names = ("gdn_prefill_backend", "kda_prefill_backend", "kda_decode_backend")
    chosen = [f"{name}={extra[name]}" for name in names if extra.get(name, "auto") != "auto"]
    mamba = getattr(getattr(config, "mamba_config", None), "backend", None)
    return ",".join(chosen) or (mamba.name.lower() if mamba is not None else "auto")


def _host_threads() -> int:
    """OpenMP's threads at its outer level: `OMP_NUM_THREADS` may list one number a level."""
    outer = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(outer) if outer.isdecimal() else os.cpu_count() or 1


def _speculative_decoding(drafting) -> str:
    return "none" if drafting is None else f"{drafting.method} {drafting.num_speculative_tokens}"


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
