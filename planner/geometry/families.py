"""vLLM architecture -> family, state, layers and attention. The one list of what is supported."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from chunk_planner.errors import PlannerError
from chunk_planner.geometry import layers, states
from chunk_planner.geometry.layers import Layers
from chunk_planner.geometry.states import StateOf
from chunk_planner.models.config import ModelConfig


@dataclass(frozen=True)
class Family:
    """What a model class has in common with its relatives.

    Attributes:
        name: the family, as results call it.
        state: the state of one layer.
        layers: how layers are counted.
        ssm_dtype_field: config field "auto" takes the recurrent dtype from, if the class has a
            hook for it (`MODELS_CONFIG_MAP`, vllm/model_executor/models/config.py).
        ssm_dtype_default: what "auto" means where neither flag nor field says more; None is the
            dtype of the convolution window.
        ssm_dtypes: the recurrent dtypes the flag can select; empty where it is ignored.
        since: first supported release that has the class.
        last_release: the last vLLM that had the class, where it is gone.
    """

    name: str
    state: StateOf
    layers: Callable[[ModelConfig], Layers]
    ssm_dtype_field: str | None = None
    ssm_dtype_default: str | None = None
    ssm_dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    since: tuple[int, int] = (0, 30)
    last_release: str | None = None


_QWEN3_NEXT = Family("GDN", states.gdn, layers.by_interval)
_QWEN3_5 = replace(_QWEN3_NEXT, ssm_dtype_field="mamba_ssm_dtype")
_KDA = Family(
    "KDA",
    states.kda,
    layers.kimi,
    ssm_dtype_default="float32",
    ssm_dtypes=("float32", "bfloat16"),
)
_BAILING_V3 = replace(_KDA, state=states.bailing_kda, layers=layers.bailing_grouped, ssm_dtypes=())
_NEMOTRON = Family("Mamba2", states.nemotron_h, layers.nemotron_h)
_NEMOTRON_HOOK = replace(
    _NEMOTRON, ssm_dtype_field="mamba_ssm_cache_dtype", ssm_dtype_default="float32"
)
_LFM2 = Family("ShortConv", states.short_conv, layers.lfm2)
_LINEAR = Family("Linear attention", states.linear, layers.bailing_linear, ssm_dtypes=())
_RING_LINEAR = replace(_LINEAR, layers=layers.bailing_grouped, last_release="none")
_MINIMAX = Family(
    "Lightning attention", states.linear, layers.minimax, ssm_dtypes=(), last_release="0.23"
)

FAMILIES: dict[str, Family] = {
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
    "Qwen4ExpForCausalLM": replace(_QWEN3_5, state=states.qwen4_exp),
    "Qwen4ExpForConditionalGeneration": replace(_QWEN3_5, state=states.qwen4_exp),
    "MiniCPMV4_6ForConditionalGeneration": _QWEN3_NEXT,
    "OlmoHybridForCausalLM": Family("GDN", states.olmo_gdn, layers.olmo_hybrid),
    "KimiLinearForCausalLM": _KDA,
    "KimiK3ForConditionalGeneration": _KDA,
    "Glm5NextForCausalLM": _KDA,
    "Glm5NextForConditionalGeneration": _KDA,
    "BailingMoeV3ForCausalLM": _BAILING_V3,
    "BailingMoeV3VLForConditionalGeneration": _BAILING_V3,
    "AliceAIForCausalLM": replace(
        _BAILING_V3, state=states.alice_kda, layers=layers.by_interval, since=(0, 33)
    ),
    "NemotronHForCausalLM": _NEMOTRON_HOOK,
    "NemotronHPuzzleForCausalLM": _NEMOTRON_HOOK,
    "NemotronH_Nano_VL_V2": _NEMOTRON_HOOK,
    # The Omni wrappers have no hook: "auto" leaves their state in the model's dtype.
    "NemotronH_Nano_Omni_Reasoning_V3": _NEMOTRON,
    "NemotronH_Omni_Reasoning_V3": _NEMOTRON,
    "NemotronH_Super_Omni_Reasoning_V3": _NEMOTRON,
    "GraniteMoeHybridForCausalLM": Family("Mamba2", states.mamba2, layers.granite),
    "BambaForCausalLM": Family("Mamba2", states.mamba2, layers.bamba, last_release="0.23"),
    "FalconH1ForCausalLM": Family("Mamba2", states.mamba2, layers.falcon_h1),
    "Zamba2ForCausalLM": Family("Mamba2", states.mamba2, layers.zamba2),
    "JambaForCausalLM": Family("Mamba1", states.mamba1, layers.jamba),
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": _LFM2,
    "Lfm2VlForConditionalGeneration": _LFM2,
    "MiniMaxText01ForCausalLM": _MINIMAX,
    "MiniMaxM1ForCausalLM": _MINIMAX,
    "MiniMaxForCausalLM": _MINIMAX,
    "BailingMoeV2_5ForCausalLM": _LINEAR,
    "BailingMoeLinearForCausalLM": _RING_LINEAR,
    "BailingMoeLinearV2ForCausalLM": _RING_LINEAR,
}

#: state-space models without attention: vLLM sizes no attention block for them
_ATTENTION_FREE = {"MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM"}

#: fields that only a model with recurrent state has
_STATE_FIELDS = (
    "linear_num_value_heads",
    "linear_attn_config",
    "hybrid_override_pattern",
    "mamba_d_state",
    "ssm_state_size",
    "attn_type_list",
    "conv_L_cache",
    "full_attention_interval",
    "layer_group_size",
)


def find_family(config: ModelConfig) -> Family:
    """The family of a model.

    Raises:
        PlannerError: a model without recurrent state or without attention, or an architecture
            that is not known; nothing is guessed.
    """
    name = config.architecture
    family = FAMILIES.get(name)
    if family is not None:
        return family
    if name in _ATTENTION_FREE:
        raise PlannerError(
            f"{config.name} ({name}): no attention layers, so there is no attention block to "
            "align with the state"
        )
    types = config.get("layer_types", config.get("layers_block_type", ()))
    linear = isinstance(types, list) and any(str(kind) in layers.STATE_TYPES for kind in types)
    if linear or any(config.get(name) is not None for name in _STATE_FIELDS):
        raise PlannerError(
            f"{config.name}: architecture {name!r} has recurrent state but is not one this "
            f"release knows; known are {', '.join(FAMILIES)}"
        )
    raise full_attention(config)


def full_attention(config: ModelConfig) -> PlannerError:
    return PlannerError(
        f"{config.name} ({config.architecture}): full attention, no recurrent state, "
        "block alignment does not apply"
    )
