"""The recurrent state of one layer on one rank, per family.

Shapes follow `MambaStateShapeCalculator` (vllm/model_executor/layers/mamba/mamba_utils.py) as
each model's `get_mamba_state_shape_from_config` calls it: the block size is taken from those.
"""

from collections.abc import Callable
from dataclasses import replace

from chunk_planner.geometry.settings import EngineSettings
from chunk_planner.geometry.state import Part, State, StateDtypes, split
from chunk_planner.models.config import ModelConfig

StateOf = Callable[[ModelConfig, EngineSettings, StateDtypes], State]


def gdn(config: ModelConfig, settings: EngineSettings, dtypes: StateDtypes) -> State:
    """Gated DeltaNet: channels of q, k and v in the window; one matrix per value head."""
    tp, k = settings.tensor_parallel_size, settings.num_speculative_tokens
    key_heads, key_dim = (
        config.integer("linear_num_key_heads"),
        config.integer("linear_key_head_dim"),
    )
    value_heads = config.integer("linear_num_value_heads")
    value_dim = config.integer("linear_value_head_dim")
    window = config.integer("linear_conv_kernel_dim") - 1
    split(config, "linear_num_key_heads", key_heads, tp)
    heads = split(config, "linear_num_value_heads", value_heads, tp)
    channels = 2 * key_dim * key_heads + value_dim * value_heads
    return State(
        Part(
            (window + k, split(config, "convolution channels", channels, tp)),
            dtypes.conv,
            f"({window} + {k} drafted) x "
            f"(2*{key_heads}*{key_dim} + {value_heads}*{value_dim})/{tp}",
        ),
        Part(
            (heads, value_dim, key_dim),
            dtypes.recurrent,
            f"{value_heads}/{tp} heads x {value_dim} x {key_dim}",
        ),
    )


def olmo_gdn(config: ModelConfig, settings: EngineSettings, dtypes: StateDtypes) -> State:
    """Olmo-Hybrid's GDN. Absent fields follow transformers' `OlmoHybridConfig`."""
    heads = config.integer("num_attention_heads")
    key_heads = config.integer("linear_num_key_heads", heads)
    key_dim = config.integer(
        "linear_key_head_dim", int(0.75 * config.integer("hidden_size", heads) / key_heads)
    )
    filled = replace(
        config,
        text={
            **config.text,
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": config.integer("linear_num_value_heads", heads),
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": config.integer("linear_value_head_dim", 2 * key_dim),
            "linear_conv_kernel_dim": config.integer("linear_conv_kernel_dim", 4),
        },
    )
    return gdn(filled, settings, dtypes)


def _kda(
    config: ModelConfig,
    settings: EngineSettings,
    dtypes: StateDtypes,
    heads: int,
    dim: int,
    kernel: int,
) -> State:
    tp, k = settings.tensor_parallel_size, settings.num_speculative_tokens
    return State(
        Part(
            (kernel - 1 + k, split(config, "convolution channels", 3 * heads * dim, tp)),
            dtypes.conv,
            f"({kernel - 1} + {k} drafted) x 3*{heads}*{dim}/{tp}",
        ),
        Part(
            (split(config, "KDA heads", heads, tp), dim, dim),
            dtypes.recurrent,
            f"{heads}/{tp} heads x {dim} x {dim}",
        ),
    )


def kda(config: ModelConfig, settings: EngineSettings, dtypes: StateDtypes) -> State:
    """Kimi Delta Attention of Kimi-Linear, Kimi-K3 and GLM-5.3-Flash.

    `linear_attn_config` holds the sizes; transformers-native files carry them as `linear_*`.
    """
    nested = config.mapping("linear_attn_config")
    if not nested:
        names = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        return _kda(config, settings, dtypes, *(config.integer(name) for name in names))
    linear = config.part("linear_attn_config")
    names = ("num_heads", "head_dim", "short_conv_kernel_size")
    return _kda(config, settings, dtypes, *(linear.integer(name) for name in names))


def bailing_kda(config: ModelConfig, settings: EngineSettings, dtypes: StateDtypes) -> State:
    """KDA of Bailing-MoE v3 (Ling / Ring 3): as many heads as the attention has."""
    names = ("num_attention_heads", "head_dim", "short_conv_kernel_size")
    return _kda(config, settings, dtypes, *(config.integer(name) for name in names))


def alice_kda(config: ModelConfig, settings: EngineSettings, dtypes: StateDtypes) -> State:
    """KDA of AliceAI, under GDN's field names."""
    names = ("linear_num_key_heads", "linear_key_head_dim", "linear_conv_kernel_dim")
    return _kda(config, settings, dtypes, *(config.integer(name) for name in names))


def _mamba2(
    config: ModelConfig,
    settings: EngineSettings,
    dtypes: StateDtypes,
    *,
    inner: int,
    groups: int,
    heads: int,
    head_dim: int,
    state: int,
    kernel: int,
    drafted: int,
) -> State:
    tp = settings.tensor_parallel_size
    # Groups that the ranks cannot share are replicated until every rank has its own.
    copies = groups if groups % tp == 0 else tp
    channels = inner + 2 * copies * state
    return State(
        Part(
            (kernel - 1 + drafted, split(config, "convolution channels", channels, tp)),
            dtypes.conv,
            f"({kernel - 1} + {drafted} drafted) x ({inner} + 2*{copies}*{state})/{tp}",
        ),
        Part(
            (split(config, "Mamba heads", heads, tp), head_dim, state),
            dtypes.recurrent,
            f"{heads}/{tp} heads x {head_dim} x {state}",
        ),
    )


def nemotron_h(config: ModelConfig, settings: EngineSettings, dtypes: StateDtypes) -> State:
    """Mamba2 of Nemotron-H and Nemotron 3 / 3.5."""
    heads, head_dim = config.integer("mamba_num_heads"), config.integer("mamba_head_dim")
    return _mamba2(
        config,
        settings,
        dtypes,
        inner=heads * head_dim,
        groups=config.first("n_groups", "mamba_n_groups"),
        heads=heads,
        head_dim=head_dim,
        state=config.integer("ssm_state_size"),
        kernel=config.first("conv_kernel", "mamba_d_conv"),
        drafted=settings.num_speculative_tokens,
    )


def mamba2(config: ModelConfig, settings: EngineSettings, dtypes: StateDtypes) -> State:
    """Mamba2 of Granite-4 hybrid, Bamba and Falcon-H1 (`mamba_*`) and Zamba2."""
    hidden = config.integer("hidden_size")
    inner = config.integer("mamba_d_ssm", 0) or config.integer("mamba_expand", 2) * hidden
    heads = config.first("mamba_n_heads", "n_mamba_heads")
    if config.get("mamba_d_head") == "auto":
        head_dim = split_heads(config, inner, heads)
    else:
        head_dim = config.first("mamba_d_head", "mamba_headdim", default=None)
        head_dim = head_dim or split_heads(config, inner, heads)
    if heads * head_dim != inner:
        raise config.error(
            "mamba_d_head", f"= {head_dim} times {heads} heads is not the inner size {inner}"
        )
    # Up to 0.31 only Nemotron-H put the drafted tokens into the window the block is sized by.
    drafted = settings.num_speculative_tokens if settings.release >= (0, 32) else 0
    return _mamba2(
        config,
        settings,
        dtypes,
        inner=inner,
        groups=config.first("mamba_n_groups", "mamba_ngroups"),
        heads=heads,
        head_dim=head_dim,
        state=config.integer("mamba_d_state"),
        kernel=config.integer("mamba_d_conv"),
        drafted=drafted,
    )


def split_heads(config: ModelConfig, inner: int, heads: int) -> int:
    if inner % heads:
        raise config.error("mamba_n_heads", f"= {heads} does not divide the inner size {inner}")
    return inner // heads


def mamba1(config: ModelConfig, settings: EngineSettings, dtypes: StateDtypes) -> State:
    """Mamba1 of Jamba. Drafted tokens do not enter its window."""
    tp = settings.tensor_parallel_size
    inner = config.integer("mamba_expand") * config.integer("hidden_size")
    share = split(config, "the Mamba inner size", inner, tp)
    window, state = config.integer("mamba_d_conv") - 1, config.integer("mamba_d_state")
    return State(
        Part((window, share), dtypes.conv, f"{window} x {inner}/{tp}"),
        Part((share, state), dtypes.recurrent, f"{inner}/{tp} x {state}"),
    )


def short_conv(config: ModelConfig, settings: EngineSettings, dtypes: StateDtypes) -> State:
    """LFM2's gated short convolution: a window and nothing else.

    The models do not pass the drafted tokens on, so the window has none.
    """
    tp = settings.tensor_parallel_size
    channels = config.integer("conv_dim", 0) or config.integer("hidden_size")
    window = config.integer("conv_L_cache") - 1
    return State(
        Part(
            (window, split(config, "convolution channels", channels, tp)),
            dtypes.conv,
            f"{window} x {channels}/{tp}",
        )
    )


def linear(config: ModelConfig, settings: EngineSettings, dtypes: StateDtypes) -> State:
    """Lightning and linear attention (MiniMax-Text-01, Bailing / Ring linear): no window."""
    tp, heads = settings.tensor_parallel_size, config.integer("num_attention_heads")
    dim = config.integer("head_dim", 0) or config.integer("hidden_size") // heads
    if not dim:
        raise config.error("hidden_size", "is smaller than num_attention_heads")
    return State(
        recurrent=Part(
            (split(config, "num_attention_heads", heads, tp), dim, dim),
            dtypes.conv,
            f"{heads}/{tp} heads x {dim} x {dim}",
        )
    )


def qwen4_exp(config: ModelConfig, settings: EngineSettings, dtypes: StateDtypes) -> State:
    """GDN with an N-gram embedding (PLE) whose dilated window every rank holds in full.

    The block is sized by the larger of the two.
    """
    state = gdn(config, settings, dtypes)
    if not config.get("ple_conv_kernel_size"):
        return state
    window = (config.integer("ple_conv_kernel_size") - 1) * config.integer("ngram_size")
    channels = config.integer("hidden_size") * config.integer("hc_count")
    k = settings.num_speculative_tokens
    ple = State(
        Part(
            (window + k, channels),
            dtypes.conv,
            f"({window} + {k} drafted) x {channels} (PLE, every rank holds all channels)",
        )
    )
    return max(state, ple, key=lambda state: state.bytes)
