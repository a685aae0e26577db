"""Which layers hold a recurrent state and which hold attention, by each family's own field."""

from dataclasses import dataclass

from chunk_planner.models.config import ModelConfig

_ATTENTION = {
    "attention",
    "full_attention",
    "indexed_attention",
    "deepseek_sparse_attention",
    "qwen_sparse_attention",
}
STATE_TYPES = {"mamba", "linear_attention", "conv", "short_conv", "kda"}
_NEITHER = {"mlp", "moe"}


@dataclass(frozen=True)
class Layers:
    """Counts over the whole model. A layer with both kinds (Falcon-H1) counts in each."""

    mamba: int
    attention: int


def from_types(config: ModelConfig, *names: str) -> Layers | None:
    """Count the first of the list fields `names` that is there; None if none is."""
    for name in names:
        types = config.sequence(name, str)
        if types is None:
            continue
        unknown = set(types) - _ATTENTION - STATE_TYPES - _NEITHER
        if unknown:
            raise config.error(name, f"has unknown layer types: {', '.join(sorted(unknown))}")
        _check_length(config, name, len(types))
        return Layers(sum(t in STATE_TYPES for t in types), sum(t in _ATTENTION for t in types))
    return None


def _check_length(config: ModelConfig, name: str, length: int) -> None:
    total = config.integer("num_hidden_layers", length)
    if total != length:
        raise config.error(
            "num_hidden_layers", f"= {total} contradicts {name!r}, which lists {length} layers"
        )


def by_interval(config: ModelConfig) -> Layers:
    """Qwen3-Next, Qwen3.5 and on: `layer_types`, else every `full_attention_interval`-th."""
    return from_types(config, "layer_types", "layers_block_type") or _every(
        config.integer("num_hidden_layers"), config.integer("full_attention_interval")
    )


def olmo_hybrid(config: ModelConfig) -> Layers:
    """`layer_types`, else every fourth layer is attention (transformers' `OlmoHybridConfig`)."""
    return from_types(config, "layer_types") or _every(config.integer("num_hidden_layers"), 4)


def _every(total: int, interval: int) -> Layers:
    return Layers(total - total // interval, total // interval)


def kimi(config: ModelConfig) -> Layers:
    """`linear_attn_config.kda_layers` and `full_attn_layers`, else `layer_types`."""
    linear = config.part("linear_attn_config")
    kda, full = linear.sequence("kda_layers", int), linear.sequence("full_attn_layers", int)
    if kda is None or full is None:
        counted = from_types(config, "layer_types")
        if counted is None:
            raise config.error("linear_attn_config", "needs 'kda_layers' and 'full_attn_layers'")
        return counted
    if set(kda) & set(full):
        raise config.error("linear_attn_config", "lists a layer as both KDA and full attention")
    _check_length(config, "linear_attn_config", len(kda) + len(full))
    return Layers(len(kda), len(full))


def bailing_grouped(config: ModelConfig) -> Layers:
    """Every `layer_group_size`-th layer is attention, and so is what is left after the last."""
    total, group = config.integer("num_hidden_layers"), config.integer("layer_group_size")
    attention = total // group + total % group
    return Layers(total - attention, attention)


def bailing_linear(config: ModelConfig) -> Layers:
    """Every `layer_group_size`-th layer is attention."""
    return _every(config.integer("num_hidden_layers"), config.integer("layer_group_size"))


def nemotron_h(config: ModelConfig) -> Layers:
    """`hybrid_override_pattern`: M is Mamba2, * attention, - MLP, E experts."""
    pattern = config.text_of("hybrid_override_pattern")
    if pattern is None:
        counted = from_types(config, "layers_block_type", "layer_types")
        if counted is None:
            raise config.error("hybrid_override_pattern", "is missing; this model family needs it")
        return counted
    unknown = set(pattern) - set("M*-E")
    if unknown:
        raise config.error(
            "hybrid_override_pattern", f"has unknown layer types: {', '.join(sorted(unknown))}"
        )
    _check_length(config, "hybrid_override_pattern", len(pattern))
    return Layers(pattern.count("M"), pattern.count("*"))


def granite(config: ModelConfig) -> Layers:
    """`layer_types` (`layers_block_type` in older files)."""
    counted = from_types(config, "layer_types", "layers_block_type")
    if counted is None:
        raise config.error("layer_types", "is missing; this model family needs it")
    return counted


def bamba(config: ModelConfig) -> Layers:
    """`attn_layer_indices`; every other layer is Mamba2."""
    return _indices(config, "attn_layer_indices")


def lfm2(config: ModelConfig) -> Layers:
    """`layer_types`, else `full_attn_idxs`; every other layer is a short convolution."""
    return from_types(config, "layer_types") or _indices(config, "full_attn_idxs")


def _indices(config: ModelConfig, name: str) -> Layers:
    total = config.integer("num_hidden_layers")
    indices = config.sequence(name, int)
    if indices is None:
        raise config.error(name, "must list the attention layers")
    if any(not 0 <= i < total for i in indices):
        raise config.error(name, f"= {indices} has a layer outside 0..{total - 1}")
    attention = len(set(indices))
    return Layers(total - attention, attention)


def falcon_h1(config: ModelConfig) -> Layers:
    """Every layer has attention heads and a Mamba2 mixer side by side."""
    total = config.integer("num_hidden_layers")
    return Layers(total, total)


def zamba2(config: ModelConfig) -> Layers:
    """Every layer has a Mamba2 mixer; `hybrid` layers add the shared attention block."""
    types = config.sequence("layers_block_type", str)
    if types is None:
        total = config.integer("num_hidden_layers")
        hybrid = config.sequence("hybrid_layer_ids", int)
        if hybrid is None:
            raise config.error("layers_block_type", "is missing; this model family needs it")
        return Layers(total, len(hybrid))
    _check_length(config, "layers_block_type", len(types))
    return Layers(len(types), sum(t == "hybrid" for t in types))


def jamba(config: ModelConfig) -> Layers:
    """`attn_layer_period` and `attn_layer_offset`, else `layers_block_type`."""
    counted = from_types(config, "layers_block_type")
    if counted is not None:
        return counted
    total, period = config.integer("num_hidden_layers"), config.integer("attn_layer_period")
    offset = config.integer("attn_layer_offset", minimum=0)
    if offset >= period:
        raise config.error("attn_layer_offset", f"= {offset} must be below the period {period}")
    attention = (total - offset + period - 1) // period
    return Layers(total - attention, attention)


def minimax(config: ModelConfig) -> Layers:
    """`attn_type_list`: 1 is softmax attention, 0 lightning attention; else `layer_types`."""
    types = config.sequence("attn_type_list", int)
    if types is None:
        counted = from_types(config, "layer_types")
        if counted is None:
            raise config.error("attn_type_list", "is missing; this model family needs it")
        return counted
    _check_length(config, "attn_type_list", len(types))
    return Layers(sum(t == 0 for t in types), sum(t == 1 for t in types))
