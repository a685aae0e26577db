"""Published block sizes, the shipped model facts, and refusals."""

import contextlib
import copy
import csv
import json
import re
from pathlib import Path

import pytest

from chunk_planner.errors import PlannerError
from chunk_planner.geometry import EngineSettings, MemorySettings, kv_left, resolve
from chunk_planner.models.config import known_models, load_config

DATA = Path(__file__).parent / "data"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "fp8"}


def gdn(value_heads, key_heads, kv_heads, head_dim, architecture="Qwen3_5ForCausalLM", **more):
    return {
        "architectures": [architecture],
        "dtype": "bfloat16",
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "num_attention_heads": 4 * kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "linear_num_value_heads": value_heads,
        "linear_num_key_heads": key_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        **more,
    }


NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "dtype": "bfloat16",
    "hybrid_override_pattern": "M*",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
}


def model_of(name: str):
    """The model of a row: a shipped one, or the geometry the row gives in brackets."""
    plain = re.split(r" [\[(]", name)[0]
    if plain in known_models():
        return plain
    if match := re.search(r"GDN (\d+)/(\d+), GQA (\d+)x(\d+)", name):
        kind = "Qwen3NextForCausalLM" if "Next" in name else "Qwen3_5ForCausalLM"
        return gdn(*map(int, match.groups()), kind)
    if "Mamba2 64x64, state 128, groups 8; GQA 2x128" in name:
        return NEMOTRON
    # The 122B's published rows are of the checkpoint that differs in weights only; a row
    # without brackets repeats the geometry of an earlier one.
    if plain == "Qwen3.5-122B-A10B":
        return "Qwen3.5-122B-A10B-NVFP4"
    return model_of(next(r["model"] for r in published() if r["model"].startswith(plain + " [")))


def published(name="block_sizes.tsv"):
    with (DATA / name).open(encoding="utf-8") as file:
        rows = csv.DictReader((line for line in file if not line.startswith("#")), delimiter="\t")
        return list(rows)


def everything_published():
    return published() + published("block_sizes_more.tsv")


def settings_of(row, **more):
    return EngineSettings(
        tensor_parallel_size=int(row["tp"]),
        kv_cache_dtype=DTYPES.get(row["kv_dtype"], row["kv_dtype"]),
        mamba_ssm_cache_dtype=DTYPES[row["ssm"]],
        num_speculative_tokens=int(row["k"]),
        **more,
    )


@pytest.mark.parametrize("version", ["0.30", "0.31", "0.32", "0.33"])
@pytest.mark.parametrize(
    "row", everything_published(), ids=lambda row: f"{row['model'][:24]}-{row['block']}"
)
def test_published_block_sizes(row, version):
    found = resolve(
        model_of(row["model"]), settings_of(row, vllm_version=version, gdn_prefill_backend="triton")
    )
    assert found.block_size == int(row["block"])
    assert found.grid_tokens == int(row["grid"])
    if row["pad_percent"]:
        assert round(found.padding_percent, 2) == float(row["pad_percent"])


def test_every_row_is_a_case():
    assert len(published()) == 19
    assert len(everything_published()) == 40


@pytest.mark.parametrize("name", sorted(known_models()))
def test_shipped_models_resolve(name):
    found = resolve(name, EngineSettings(vllm_version="0.33"))
    assert found.block_size % found.grid_tokens == 0
    assert found.page_bytes >= found.state_bytes_per_layer > 0
    assert json.dumps(found.to_json())


@pytest.mark.parametrize(
    ("name", "mamba", "attention"),
    [
        ("GLM-5.3-Flash", 34, 11),
        ("Qwen3.5-27B", 48, 16),
        ("Qwen3.5-35B-A3B", 30, 10),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 23, 6),
        ("NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 40, 8),
        ("Nemotron-H-56B-Base-8K", 54, 10),
    ],
)
def test_layer_counts(name, mamba, attention):
    found = resolve(name)
    assert (found.mamba_layers, found.attention_layers) == (mamba, attention)


def sizes(hidden, heads, kv_heads, head_dim, **more):
    return {
        "dtype": "bfloat16",
        "num_hidden_layers": 2,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        **more,
    }


def mamba2_sizes(heads, head_dim, groups, state):
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": groups,
        "mamba_d_state": state,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    }


GRANITE = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "layer_types": ["mamba", "attention"],
}
KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"],
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "linear_attn_config": {
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "kda_layers": [1],
        "full_attn_layers": [2],
    },
}


@pytest.mark.parametrize(
    ("config", "ssm", "conv_bytes", "recurrent_bytes", "block"),
    [
        # A table of state sizes by vLLM 0.33's formulas: Granite-4.0-H-Small and -Tiny,
        # Falcon-H1-34B, Kimi-Linear-48B.
        (
            {**sizes(4096, 32, 8, 128), **GRANITE, **mamba2_sizes(128, 64, 1, 128)},
            "auto", 50688, 2097152, 528,
        ),
        (
            {**sizes(1536, 12, 4, 128), **GRANITE, **mamba2_sizes(48, 64, 1, 128)},
            "auto", 19968, 786432, 400,
        ),
        (
            {
                **sizes(5120, 20, 4, 128),
                **mamba2_sizes(32, 128, 2, 256),
                "architectures": ["FalconH1ForCausalLM"],
                "mamba_d_ssm": 4096,
            },
            "auto", 30720, 2097152, 1040,
        ),
        ({**sizes(2304, 32, 32, 72), **KIMI_LINEAR}, "auto", 73728, 2097152, 1920),
        # Nemotron-Nano-9B-v2, vllm issue 24280: 672 with the state in bfloat16.
        (
            {
                **NEMOTRON,
                "num_attention_heads": 40,
                "num_key_value_heads": 8,
                "mamba_num_heads": 128,
                "mamba_head_dim": 80,
            },
            "bfloat16", 73728, 2621440, 672,
        ),
        # LFM2.5-1.2B, published start-up log: 16 tokens, padded by 300 %.
        (
            {
                **sizes(2048, 32, 8, 64),
                "architectures": ["Lfm2ForCausalLM"],
                "layer_types": ["conv", "full_attention"],
                "conv_dim": 2048,
                "conv_L_cache": 3,
            },
            "auto", 8192, 0, 16,
        ),
        # Lightning attention has no window: MiniMax-Text-01's heads, Jamba's and Zamba2's mixers
        # by hand.
        (
            {
                **sizes(6144, 64, 8, 128),
                "architectures": ["MiniMaxText01ForCausalLM"],
                "attn_type_list": [0, 1],
            },
            "auto", 0, 64 * 128 * 128 * 2, 512,
        ),
        (
            {
                **sizes(4096, 32, 8, 128),
                "architectures": ["JambaForCausalLM"],
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "mamba_expand": 2,
                "mamba_d_state": 16,
                "mamba_d_conv": 4,
            },
            "auto", 8192 * 3 * 2, 8192 * 16 * 2, 80,
        ),
        (
            {
                **sizes(3584, 32, 32, 0),
                "architectures": ["Zamba2ForCausalLM"],
                "layers_block_type": ["mamba", "hybrid"],
                "attention_head_dim": 224,
                "mamba_expand": 2,
                "n_mamba_heads": 112,
                "mamba_headdim": 64,
                "mamba_ngroups": 2,
                "mamba_d_state": 64,
                "mamba_d_conv": 4,
            },
            "auto", (7168 + 256) * 3 * 2, 112 * 64 * 64 * 2, 48,
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("version", ["0.30", "0.33"])
def test_families_by_size(config, ssm, conv_bytes, recurrent_bytes, block, version):
    found = resolve(config, EngineSettings(vllm_version=version, mamba_ssm_cache_dtype=ssm))
    assert (found.conv_bytes, found.recurrent_bytes) == (conv_bytes, recurrent_bytes)
    assert found.block_size == block


def test_drafted_tokens_in_the_window_by_release():
    """Up to 0.31 only Nemotron-H among the Mamba2 models counted them."""
    granite = {**sizes(4096, 32, 8, 128), **GRANITE, **mamba2_sizes(128, 64, 1, 128)}

    def conv(config, version):
        flags = {"vllm_version": version, "num_speculative_tokens": 3}
        return resolve(config, EngineSettings(**flags)).conv_bytes

    assert (conv(granite, "0.31"), conv(granite, "0.32")) == (50688, 2 * 50688)
    assert conv(NEMOTRON, "0.30") == conv(NEMOTRON, "0.33") == 2 * 36864


def test_kda_state_dtype_by_release():
    bf16 = {"mamba_ssm_cache_dtype": "bfloat16"}
    old = resolve("GLM-5.3-Flash", EngineSettings(vllm_version="0.31", **bf16))
    new = resolve("GLM-5.3-Flash", EngineSettings(vllm_version="0.32", **bf16))
    assert (old.mamba_ssm_cache_dtype, new.mamba_ssm_cache_dtype) == ("float32", "bfloat16")
    assert any("no effect" in note for note in old.notes)
    with pytest.raises(PlannerError, match="float32 or bfloat16"):
        resolve("Kimi-K3", EngineSettings(vllm_version="0.33", mamba_ssm_cache_dtype="float16"))


def test_gdn_grid_follows_release_and_backend():
    def block(version, **flags):
        return resolve("Qwen3.5-27B", EngineSettings(vllm_version=version, **flags)).block_size

    assert block("0.32") == 784
    assert block("0.33") == 832
    assert block("0.33", gdn_prefill_backend="triton") == 784
    assert block("0.33", device_name="NVIDIA A100-SXM4-80GB") == 784
    assert block("0.33", kv_cache_dtype="fp8") == 1600
    assert block("0.33", device_name="B200", attention_backend="FLASH_ATTN") == 896
    assert block("0.32", block_size=64) == 832


def test_cpu_base_block():
    tiny = gdn(4, 2, 1, 64, "Qwen3NextForCausalLM")
    found = resolve(tiny, EngineSettings(vllm_version="0.32", device_name="cpu"))
    assert (found.block_size, found.state_bytes_per_layer) == (1152, 268288)
    assert round(found.padding_percent, 2) == 9.92


def test_glm_on_sm120_takes_whole_indexer_pages():
    flags = {"kv_cache_dtype": "fp8", "tensor_parallel_size": 8, "device_name": "RTX PRO 6000"}
    for version in ("0.31", "0.32"):
        found = resolve("GLM-5.3-Flash", EngineSettings(vllm_version=version, **flags))
        assert found.block_size % 256 == 0
        assert found.kv_cache_dtype == "fp8_ds_mla"


def test_auto_kv_dtype_follows_the_checkpoint():
    modelopt = {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}
    tensors = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
    for quant, dtype in ((modelopt, "fp8_e4m3"), (tensors, "fp8")):
        found = resolve({**gdn(48, 16, 4, 256), "quantization_config": quant})
        assert found.kv_cache_dtype == dtype
        assert found.attention_bytes_per_token == 2048
        assert any("'auto'" in note for note in found.notes)


def test_hf_quant_config_beside_the_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(gdn(48, 16, 4, 256)))
    quant = {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quant))
    assert resolve(tmp_path).kv_cache_dtype == "fp8_e4m3"


@pytest.mark.parametrize(
    ("config", "flags", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, "full attention, no recurrent state"),
        ({"model_type": "qwen3_next"}, {}, "'architectures' is missing"),
        ({"architectures": ["NewForCausalLM"], "mamba_d_state": 16}, {}, "not one this release"),
        ({"architectures": ["Mamba2ForCausalLM"]}, {}, "no attention layers"),
        (gdn(48, 16, 4, 256), {"tensor_parallel_size": 3}, "tensor_parallel_size = 3"),
        (gdn(48, 16, 4, 256), {"kv_cache_dtype": "fp8_ds_mla"}, "MLA models"),
        (gdn(48, 16, 4, 256), {"kv_cache_dtype": "fp9"}, "kv_cache_dtype = 'fp9'"),
        (gdn(48, 16, 4, 256), {"attention_backend": "NONE"}, "attention_backend = 'NONE'"),
        (gdn(48, 16, 4, 256), {"device_name": "abacus"}, "device_name = 'abacus'"),
        (gdn(48, 16, 4, 256, linear_conv_kernel_dim="four"), {}, "not a whole number"),
        (gdn(48, 16, 4, 256, layer_types=["full_attention"]), {}, "contradicts"),
        (gdn(48, 16, 4, 256, layer_types=["full_attention"] * 4), {}, "no recurrent state"),
        ({**NEMOTRON, "hybrid_override_pattern": "MX"}, {}, "unknown layer types: X"),
        ({**NEMOTRON, "ssm_state_size": None}, {}, "'ssm_state_size' is missing"),
        ({**NEMOTRON, "n_groups": None}, {}, "'n_groups' is missing"),
    ],
)
def test_refusals(config, flags, message):
    with pytest.raises(PlannerError, match=re.escape(message)):
        resolve(config, EngineSettings(**flags))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vllm_version", "0.17"),
        ("tensor_parallel_size", 0),
        ("mamba_ssm_cache_dtype", "fp8"),
        ("gdn_prefill_backend", "cuda"),
        ("num_speculative_tokens", -1),
    ],
)
def test_settings_name_the_field(field, value):
    with pytest.raises(PlannerError, match=f"{field} = {value!r}"):
        EngineSettings(**{field: value})


@pytest.mark.parametrize("name", sorted(known_models()))
def test_damaged_fields_are_refused_or_read(name):
    """No field of a config, whatever is in it, gets further than a sentence about it."""

    def paths(part, prefix=()):
        for key, value in part.items():
            yield (*prefix, key)
            if isinstance(value, dict):
                yield from paths(value, (*prefix, key))

    root = load_config(name).root
    for path in paths(root):
        for damage in (None, "x", -1, 0, [], {}, float("inf"), 10**30):
            config = copy.deepcopy(root)
            part = config
            for key in path[:-1]:
                part = part[key]
            part[path[-1]] = damage
            with contextlib.suppress(PlannerError):
                kv_left(resolve(config), MemorySettings(80 * 2**30), 8192)


def test_older_builds_counted_the_whole_mla_record():
    """A start-up log of a build before 0.30 has 1664 tokens and 0.57 % for this."""
    flags = {"tensor_parallel_size": 4, "kv_cache_dtype": "fp8_ds_mla"}
    found = resolve("GLM-5.3-Flash", EngineSettings(vllm_version="0.31", **flags))
    assert found.block_size == 2176
    assert found.kv_bytes_per_token == 11 * 656
    assert any("1664 tokens and 0.57 % padding" in note for note in found.notes)


def test_unreadable_models(tmp_path):
    with pytest.raises(PlannerError, match=r"no config\.json"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3')
    with pytest.raises(PlannerError, match=r"config\.json: not valid JSON .* line 1"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(PlannerError, match="not a JSON object"):
        resolve(tmp_path)
    with pytest.raises(PlannerError, match=r"well-known models: .*GLM-5\.3-Flash"):
        resolve("no-such-model")
