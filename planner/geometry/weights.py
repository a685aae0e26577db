"""Bytes of weights on one rank: from the checkpoint's files where they are there, else counted."""

import json
from dataclasses import dataclass

from chunk_planner.errors import PlannerError
from chunk_planner.geometry.attention import head_size
from chunk_planner.geometry.kv_dtype import is_mla, model_dtype, quantization
from chunk_planner.geometry.resolve import Geometry
from chunk_planner.geometry.settings import DTYPE_BYTES
from chunk_planner.geometry.state import Part
from chunk_planner.models.config import ModelConfig

# Bytes per weight of the quantized part, scales included (one fp8 scale per 16 fp4 values).
_QUANTIZED = {"fp8": 1.0, "nvfp4": 0.5 + 1 / 16, "mxfp4": 0.5 + 1 / 32, "int4": 0.5 + 1 / 32}


@dataclass(frozen=True)
class Weights:
    """Bytes on one rank and where the number is from."""

    bytes: int
    source: str


def weights(geometry: Geometry) -> Weights:
    """The weights of one rank: the checkpoint's size over the ranks.

    Taken from the safetensors index, else from the safetensors files, else counted from the
    config's sizes, which leaves out norms, vision towers and what the ranks replicate.

    Raises:
        PlannerError: neither files nor enough config fields; ask for the number instead.
    """
    settings = geometry.settings
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    found = _checkpoint_bytes(geometry.config)
    if found is not None:
        size, source = found
        return Weights(size // ranks, f"{source} / {ranks} ranks")
    try:
        size = _counted_bytes(geometry)
    except PlannerError as error:
        raise PlannerError(
            f"the weights of {geometry.model} cannot be counted ({error}); give --weight-bytes"
        ) from None
    return Weights(int(size) // ranks, f"modelled: sizes in config.json / {ranks} ranks")


def _checkpoint_bytes(config: ModelConfig) -> tuple[int, str] | None:
    if config.folder is None:
        return None
    index = config.folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            size = json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]
            return int(size), "safetensors index"
        except (ValueError, KeyError, TypeError):
            raise PlannerError(f"{index}: no metadata.total_size in it") from None
    files = list(config.folder.glob("*.safetensors"))
    return (sum(file.stat().st_size for file in files), "safetensors files") if files else None


def _counted_bytes(geometry: Geometry) -> float:
    config = geometry.config
    plain = DTYPE_BYTES[model_dtype(config, geometry.settings)]
    quantized = _weight_bytes(config, plain)
    hidden, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    tied = config.get("tie_word_embeddings", config.root.get("tie_word_embeddings"))
    total = hidden * vocab * (1 if tied else 2) * plain
    total += geometry.attention_layers * _attention(config) * quantized
    total += geometry.mamba_layers * _mixer(geometry) * quantized
    return total + _feed_forward(config) * quantized


def _weight_bytes(config: ModelConfig, plain: int) -> float:
    quant = quantization(config) or config.mapping("quantization_config")
    text = json.dumps(quant).lower()
    if not quant:
        return plain
    for name in ("nvfp4", "mxfp4"):
        if name in text:
            return _QUANTIZED[name]
    bits = quant.get("bits") or quant.get("w_bit")
    if bits == 4 or '"num_bits": 4' in text:
        return _QUANTIZED["int4"]
    return _QUANTIZED["fp8"] if "fp8" in text or "float-quantized" in text else plain


def _attention(config: ModelConfig) -> int:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if is_mla(config):
        rank, rope = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim", 0)
        nope, value = config.integer("qk_nope_head_dim"), config.integer("v_head_dim")
        query = config.integer("q_lora_rank", 0)
        q = hidden * heads * (nope + rope)
        if query:
            q = hidden * query + query * heads * (nope + rope)
        return q + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    head = head_size(config)
    kv_heads = config.integer("num_key_value_heads", heads)
    queries = 2 if config.get("attn_output_gate") else 1
    return hidden * head * (queries * heads + 2 * kv_heads) + heads * head * hidden


def _mixer(geometry: Geometry) -> int:
    """In and out projections of one recurrent layer, from the sizes of its state.

    The window holds the channels of the projections; a gate and the way out are each as wide
    as the values.
    """
    hidden = geometry.config.integer("hidden_size")
    ranks = geometry.settings.tensor_parallel_size
    conv, recurrent = geometry.state.conv, geometry.state.recurrent
    channels = conv.shape[-1] * ranks if conv.shape else 0
    width = _values(recurrent) * ranks if recurrent.shape else channels
    if not channels:
        channels = 3 * width
    return hidden * (channels + 2 * width)


def _values(recurrent: Part) -> int:
    return recurrent.shape[0] * (recurrent.shape[1] if len(recurrent.shape) == 3 else 1)


def _feed_forward(config: ModelConfig) -> int:
    hidden = config.integer("hidden_size")
    layers = config.integer("num_hidden_layers")
    names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    experts = config.first(*names, default=0, minimum=0)
    pattern = config.text_of("hybrid_override_pattern")
    matrices = 2 if config.get("mlp_hidden_act") == "relu2" else 3
    if not experts:
        dense = pattern.count("-") if pattern else layers
        return dense * matrices * hidden * config.integer("intermediate_size")
    inner = config.first("moe_intermediate_size", "intermediate_size")
    width = config.first("moe_latent_size", "routed_expert_hidden_size", default=hidden)
    copies = config.first("n_shared_experts", "num_shared_experts", default=0, minimum=0)
    names = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    shared = config.first(*names, default=copies * inner, minimum=0)
    one = matrices * (experts * width * inner + hidden * shared)
    first_dense = config.first("first_k_dense_replace", "num_dense_layers", default=0, minimum=0)
    sparse = pattern.count("E") if pattern else layers - first_dense
    dense = 0 if pattern else layers - sparse
    return sparse * one + dense * matrices * hidden * config.integer("intermediate_size", inner)
