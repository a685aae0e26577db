"""The geometry against the installed vLLM's own classes, over random shapes and TP."""

import contextlib
import importlib
import random
from dataclasses import replace
from types import SimpleNamespace as Namespace
from unittest import mock

import pytest

from chunk_planner.errors import PlannerError
from chunk_planner.geometry import EngineSettings, resolve
from chunk_planner.geometry.grid import KERNEL_BLOCK
from chunk_planner.geometry.kv_dtype import KV_CACHE_DTYPES
from chunk_planner.geometry.settings import STATE_DTYPES
from chunk_planner.rule import find_release

pytestmark = pytest.mark.engine
vllm = pytest.importorskip("vllm")

VERSION = find_release(vllm.__version__).version
CASES = 60


def pick(rng, *values):
    return rng.choice(values)


def gqa(rng, **more):
    kv = pick(rng, 1, 2, 4, 8)
    return {
        "dtype": pick(rng, "bfloat16", "float16"),
        "num_attention_heads": kv * pick(rng, 4, 8),
        "num_key_value_heads": kv,
        "head_dim": pick(rng, 64, 128, 256),
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        **more,
    }


def mla(rng, **more):
    heads = pick(rng, 16, 32, 64)
    return {
        "dtype": "bfloat16",
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": pick(rng, 256, 512),
        "qk_rope_head_dim": pick(rng, 0, 64),
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        **more,
    }


def gdn_fields(rng):
    key_heads = pick(rng, 4, 8, 16)
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * pick(rng, 1, 2, 3, 4),
        "linear_key_head_dim": pick(rng, 64, 128),
        "linear_value_head_dim": pick(rng, 64, 128, 256),
        "linear_conv_kernel_dim": pick(rng, 2, 4),
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    }


def kda_fields(rng):
    return {
        "num_heads": pick(rng, 16, 32, 64),
        "head_dim": pick(rng, 64, 128),
        "short_conv_kernel_size": pick(rng, 3, 4),
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "gate_lower_bound": -5.0,
    }


def granite_fields(rng, heads="mamba_n_heads", groups="mamba_n_groups", dim="mamba_d_head"):
    count = pick(rng, 32, 64)
    return {
        "mamba_expand": 2,
        heads: count,
        dim: 2 * 2048 // count,
        groups: pick(rng, 1, 2, 8),
        "mamba_d_state": pick(rng, 64, 128, 256),
        "mamba_d_conv": 4,
    }


def qwen3_next(rng):
    return gqa(rng, **gdn_fields(rng)), "qwen3_next"


def qwen3_5(rng):
    return gqa(rng, mamba_ssm_dtype=pick(rng, "float32", "bfloat16"), **gdn_fields(rng)), "qwen3_5"


def olmo_hybrid(rng):
    return gqa(rng, **gdn_fields(rng)), "olmo_hybrid"


def kimi_linear(rng):
    return mla(rng, linear_attn_config=kda_fields(rng)), "kimi_linear"


def bailing_v3(rng):
    fields = {"head_dim": 128, "short_conv_kernel_size": 4, "layer_group_size": 4}
    return mla(rng, **fields), "bailing_hybrid"


def nemotron_h(rng):
    fields = {
        "hybrid_override_pattern": "MM*-",
        "mamba_num_heads": pick(rng, 32, 64, 128),
        "mamba_head_dim": pick(rng, 64, 80),
        "ssm_state_size": pick(rng, 64, 128),
        "n_groups": pick(rng, 1, 2, 8),
        "conv_kernel": 4,
    }
    if rng.random() < 0.5:
        fields["mamba_ssm_cache_dtype"] = "float16"
    return gqa(rng, **fields), "nemotron_h"


def granite(rng):
    types = ["mamba", "mamba", "attention", "mamba"]
    return gqa(rng, layer_types=types, **granite_fields(rng)), "granitemoehybrid"


def falcon_h1(rng):
    return gqa(rng, mamba_d_ssm=4096, **granite_fields(rng)), "falcon_h1"


def zamba2(rng):
    fields = granite_fields(rng, "n_mamba_heads", "mamba_ngroups", "mamba_headdim")
    types = ["mamba", "hybrid", "mamba", "mamba"]
    config = gqa(rng, layers_block_type=types, **fields)
    del config["head_dim"]
    config["attention_head_dim"] = 2 * 2048 // config["num_attention_heads"]
    return config, "zamba2"


def jamba(rng):
    fields = {"mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4}
    return gqa(rng, attn_layer_period=4, attn_layer_offset=2, **fields), "jamba"


def lfm2(rng):
    types = ["conv", "conv", "full_attention", "conv"]
    return gqa(rng, layer_types=types, conv_dim=2048, conv_L_cache=pick(rng, 3, 4)), "lfm2"


def lfm2_moe(rng):
    types = ["conv", "conv", "full_attention", "conv"]
    return gqa(rng, layer_types=types, conv_L_cache=3), "lfm2_moe"


def bailing_linear(rng):
    return mla(rng, head_dim=128, layer_group_size=4), "bailing_hybrid"


# architecture -> fields, and the class in vLLM that sizes it. Classes that need torchvision are
# stood in for by the relative that calls the same calculators with the same fields.
MODELS = {
    "Qwen3NextForCausalLM": (qwen3_next, "qwen3_next:Qwen3NextForCausalLM"),
    "Qwen3_5ForCausalLM": (qwen3_5, "qwen3_next:Qwen3NextForCausalLM"),
    "OlmoHybridForCausalLM": (olmo_hybrid, "olmo_hybrid:OlmoHybridForCausalLM"),
    "KimiLinearForCausalLM": (
        kimi_linear,
        "vllm.models.kimi_k3.nvidia.model:KimiLinearForCausalLM",
    ),
    "BailingMoeV3ForCausalLM": (bailing_v3, "bailing_moe_v3:BailingMoeV3ForCausalLM"),
    "NemotronHForCausalLM": (nemotron_h, "nemotron_h:NemotronHForCausalLM"),
    "GraniteMoeHybridForCausalLM": (granite, "granitemoehybrid:GraniteMoeHybridForCausalLM"),
    "FalconH1ForCausalLM": (falcon_h1, "falcon_h1:FalconH1ForCausalLM"),
    "Zamba2ForCausalLM": (zamba2, "zamba2:Zamba2ForCausalLM"),
    "JambaForCausalLM": (jamba, "jamba:JambaForCausalLM"),
    "Lfm2ForCausalLM": (lfm2, "lfm2:Lfm2ForCausalLM"),
    "Lfm2MoeForCausalLM": (lfm2_moe, "lfm2_moe:Lfm2MoeForCausalLM"),
    "BailingMoeV2_5ForCausalLM": (bailing_linear, "bailing_moe_linear:BailingMoeV25ForCausalLM"),
}


def model_class(path):
    module, name = path.split(":")
    if not module.startswith("vllm."):
        module = f"vllm.model_executor.models.{module}"
    return getattr(importlib.import_module(module), name)


def backend_class(name):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[name].get_class()


def checkpoint_alignment(alignment):
    """0.33 asks the built layers for it; there are none here."""
    module = importlib.import_module("vllm.model_executor.layers.mamba.abstract")
    name = "get_mamba_prefill_checkpoint_alignment"
    if not hasattr(module, name):
        return contextlib.nullcontext()
    return mock.patch.object(module, name, return_value=alignment)


@contextlib.contextmanager
def no_current_config(_config):
    yield


def engine_block(architecture, config, model_type, settings, cls, backend, alignment):
    """Block, state bytes and padded page as vLLM's own `_align_hybrid_block_size` leaves them."""
    import torch
    from vllm.config.cache import CacheConfig
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.platforms.interface import Platform
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )
    from vllm.v1.kv_cache_interface import MambaSpec

    hf = Namespace(**config, architectures=[architecture], model_type=model_type)
    convertor = MODEL_ARCH_CONFIG_CONVERTORS.get(model_type, ModelArchConfigConvertorBase)(hf, hf)
    use_mla = convertor.is_deepseek_mla()
    kv_heads = (
        1
        if use_mla
        else max(1, convertor.get_total_num_kv_heads() // settings.tensor_parallel_size)
    )
    k = settings.num_speculative_tokens
    cache = Namespace(
        cache_dtype=settings.kv_cache_dtype,
        block_size=settings.block_size
        or backend.get_preferred_block_size(CacheConfig.DEFAULT_BLOCK_SIZE),
        mamba_cache_mode="align",
        mamba_block_size=None,
        user_specified_mamba_block_size=False,
        mamba_page_size_padded=None,
        mamba_cache_dtype=settings.mamba_cache_dtype,
        mamba_ssm_cache_dtype=settings.mamba_ssm_cache_dtype,
        kv_cache_dtype_skip_layers=list(settings.kv_cache_dtype_skip_layers),
        skip_page_size_padded=None,
        use_replayssm=False,
        use_kda_recoverssm=False,
    )
    vllm_config = Namespace(
        cache_config=cache,
        model_config=Namespace(
            dtype=getattr(torch, config["dtype"]),
            hf_config=hf,
            hf_text_config=hf,
            use_mla=use_mla,
            architecture=architecture,
            get_num_kv_heads=lambda _parallel: kv_heads,
            get_head_size=convertor.get_head_size,
        ),
        parallel_config=Namespace(tensor_parallel_size=settings.tensor_parallel_size),
        speculative_config=Namespace(num_speculative_tokens=k) if k else None,
        num_speculative_tokens=k,
    )
    hook = MODELS_CONFIG_MAP.get(architecture)
    if hook is not None:
        hook.verify_and_update_config(vllm_config)
    state = MambaSpec(
        block_size=-1,
        shapes=cls.get_mamba_state_shape_from_config(vllm_config),
        dtypes=cls.get_mamba_state_dtype_from_config(vllm_config),
    ).page_size_bytes
    with (
        checkpoint_alignment(alignment),
        mock.patch("vllm.config.vllm.set_current_vllm_config", no_current_config),
        mock.patch(
            "vllm.model_executor.models.ModelRegistry.resolve_model_cls", return_value=(cls, "")
        ),
        mock.patch.object(
            Platform, "_find_non_ssm_backends", classmethod(lambda *_: [backend]), create=True
        ),
    ):
        Platform._align_hybrid_block_size(vllm_config, backend)
        if cache.kv_cache_dtype_skip_layers:
            Platform._align_heterogeneous_kv_block_size(vllm_config, backend)
    # A state that fills its page exactly is left without padding.
    page = cache.mamba_page_size_padded or state
    return cache.block_size, state, None if settings.kv_cache_dtype_skip_layers else page


@pytest.mark.parametrize("architecture", MODELS)
def test_block_as_the_engine_aligns_it(architecture):
    """Shapes, dtypes, attention bytes and block, through vLLM's model class and platform."""
    fields, path = MODELS[architecture]
    cls = model_class(path)
    rng = random.Random(architecture)
    compared = 0
    for _ in range(CASES):
        config, model_type = fields(rng)
        flashinfer = architecture.startswith("Qwen") and rng.random() < 0.5
        is_mla = "kv_lora_rank" in config
        backend = (
            pick(rng, "TRITON_MLA", "FLASHMLA")
            if is_mla
            else pick(rng, "TRITON_ATTN", "FLASH_ATTN", "HPC_ATTN")
        )
        dtypes = ["auto", "bfloat16", "fp8", "fp8_e5m2"]
        dtypes += ["fp8_ds_mla", "nvfp4_ds_mla", "int8_per_token_head"] if is_mla else []
        if backend == "TRITON_ATTN":
            dtypes += ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"]
        kda = "linear_attn_config" in config
        skipped = not is_mla and rng.random() < 0.2
        if skipped:
            backend = pick(rng, "TURBOQUANT", "TRITON_ATTN")
            dtypes = (
                ["fp8"] if backend == "TRITON_ATTN" else ["turboquant_k8v4", "turboquant_4bit_nc"]
            )
        settings = EngineSettings(
            vllm_version=VERSION,
            tensor_parallel_size=pick(rng, 1, 2, 4, 8),
            kv_cache_dtype=pick(rng, *dtypes),
            mamba_cache_dtype=pick(rng, *STATE_DTYPES),
            mamba_ssm_cache_dtype=pick(rng, "auto", "float32", "bfloat16")
            if kda
            else pick(rng, *STATE_DTYPES),
            num_speculative_tokens=pick(rng, 0, 0, 1, 3, 7),
            block_size=pick(rng, None, None, 64, 256),
            kv_cache_dtype_skip_layers=("3",) if skipped else (),
            attention_backend=backend,
            device_name="A100",
        )
        flashinfer = flashinfer and not skipped
        if flashinfer:
            # Not with FLASH_ATTN, whose block also follows the device.
            settings = replace(settings, device_name="H100", attention_backend="TRITON_ATTN")
        try:
            found = resolve({**config, "architectures": [architecture]}, settings)
        except PlannerError as error:
            if "divide" not in str(error):
                raise
            continue
        wanted = engine_block(
            architecture,
            config,
            model_type,
            settings,
            cls,
            backend_class(settings.attention_backend),
            64 if flashinfer else None,
        )
        page = None if skipped else found.page_bytes
        assert (found.block_size, found.state_bytes_per_layer, page) == wanted, (config, settings)
        compared += 1
    assert compared > CASES / 2


@pytest.mark.parametrize("name", KERNEL_BLOCK)
def test_kernel_blocks(name):
    try:
        cls = backend_class(name)
        sizes = cls.get_supported_kernel_block_sizes()
    except Exception as error:  # a backend's kernels are missing here, each in its own way
        pytest.skip(f"{name} cannot be imported on this machine: {error}")
    assert KERNEL_BLOCK[name] == min(getattr(size, "base", size) for size in sizes)


@pytest.mark.parametrize("dtype", [d for d in KV_CACHE_DTYPES if d.startswith("turboquant")])
def test_turboquant_slots(dtype):
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    backend = backend_class("TURBOQUANT")
    rng = random.Random(dtype)
    for _ in range(20):
        config, _ = qwen3_next(rng)
        found = resolve(
            {**config, "architectures": ["Qwen3NextForCausalLM"]},
            EngineSettings(vllm_version=VERSION, kv_cache_dtype=dtype),
        )
        spec = FullAttentionSpec(
            block_size=1,
            num_kv_heads=config["num_key_value_heads"],
            head_size=config["head_dim"],
            dtype=torch.uint8,
            kv_quant_mode=get_kv_quant_mode(dtype),
        )
        assert found.attention_bytes_per_token == backend.customize_spec(spec).page_size_bytes


def test_cache_dtypes_are_vllms():
    from typing import get_args

    from vllm.config.cache import CacheDType, MambaDType

    theirs = {dtype for dtype in get_args(CacheDType) if not dtype.startswith("octave")}
    assert set(KV_CACHE_DTYPES) - {"ultraquant_4bit"} == theirs - {"ultraquant_4bit"}
    assert set(STATE_DTYPES) == set(get_args(MambaDType))


def test_checkpoint_kv_dtypes():
    """`auto` resolves as vLLM resolves it, for every way ModelOpt writes it down."""
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    config, _ = qwen3_next(random.Random(0))
    schemes = [{"kv_cache_quant_algo": algo} for algo in ("FP8", "fp8", "NVFP4", "INT8", None)] + [
        {"kv_cache_scheme": {"num_bits": bits, "type": kind, "dynamic": dynamic}}
        for bits in (4, 8)
        for kind in ("float", "int")
        for dynamic in (False, True)
    ]
    for scheme in schemes:
        for nested in (False, True):
            quant = {"quant_method": "modelopt"}
            quant.update({"quantization": scheme} if nested else scheme)
            hf = Namespace(quantization_config=quant)
            wanted = resolve_kv_cache_dtype_string("auto", Namespace(hf_config=hf))
            found = resolve(
                {
                    **config,
                    "architectures": ["Qwen3NextForCausalLM"],
                    "quantization_config": quant,
                },
                EngineSettings(vllm_version=VERSION),
            )
            assert found.kv_cache_dtype == (config["dtype"] if wanted == "auto" else wanted)


def published_lists(config):
    """Layer lists as transformers and vLLM derive them from a checkpoint's own fields."""
    types = getattr(config, "layers_block_type", None) or config.layer_types
    state = {"mamba", "linear_attention", "conv"}
    attention = {"attention", "full_attention", "indexed_attention"}
    if config.model_type in ("zamba2", "falcon_h1"):
        return len(types), types.count("hybrid")
    return sum(t in state for t in types), sum(t in attention for t in types)


@pytest.mark.parametrize(
    ("architecture", "model_type", "fields"),
    [
        ("Qwen3NextForCausalLM", "qwen3_next", {"num_hidden_layers": 12}),
        ("Qwen3_5ForCausalLM", "qwen3_5_text", {"num_hidden_layers": 8}),
        ("OlmoHybridForCausalLM", "olmo_hybrid", {"num_hidden_layers": 9}),
        ("BambaForCausalLM", "bamba", {"num_hidden_layers": 9, "attn_layer_indices": [2, 5]}),
        ("FalconH1ForCausalLM", "falcon_h1", {"num_hidden_layers": 5}),
        ("JambaForCausalLM", "jamba", {"num_hidden_layers": 17}),
        ("Lfm2ForCausalLM", "lfm2", {"num_hidden_layers": 6, "full_attn_idxs": [1, 4]}),
        ("NemotronHForCausalLM", "nemotron_h", {"hybrid_override_pattern": "MEM*-M*E"}),
        ("Zamba2ForCausalLM", "zamba2", {}),
        (
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3},
        ),
    ],
)
def test_layers_and_sizes_as_transformers_reads_them(architecture, model_type, fields):
    """A saved transformers config, with its defaults written out, resolves to its own lists."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **fields)
    saved = {**config.to_dict(), "architectures": [architecture], "dtype": "bfloat16"}
    if model_type == "qwen3_5_text":
        saved["mamba_ssm_dtype"] = "float32"
    if model_type == "lfm2":
        saved["conv_dim"] = config.hidden_size
    found = resolve(saved, EngineSettings(vllm_version=VERSION, gdn_prefill_backend="triton"))
    assert (found.mamba_layers, found.attention_layers) == published_lists(config)
