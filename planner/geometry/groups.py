"""How vLLM puts the layers into KV cache groups, and what a request takes of the shared pool.

All groups draw block ids from one pool, so a block is as wide as the widest group. Source:
`_get_kv_cache_groups_uniform_page_size` and `_get_packed_kv_cache_groups`
(vllm/v1/core/kv_cache_utils.py, 0.30 to 0.32; vllm/v1/core in 0.33).
"""

from dataclasses import dataclass
from math import ceil

from chunk_planner.geometry.resolve import Geometry

#: one key (128 x fp8) and its fp32 scale of the DSA indexer, per pooled entry
_INDEXER_HEAD_BYTES = 4


@dataclass(frozen=True)
class Groups:
    """KV cache groups of one rank.

    Attributes:
        attention: groups that need a block per `block_size` tokens.
        state: groups that need `state_blocks_per_request` blocks per request.
        fixed: groups that need one block per request (the indexer's ring).
        bytes_per_block: what one block id takes over all layers.
    """

    attention: int
    state: int
    fixed: int
    bytes_per_block: int

    @property
    def count(self) -> int:
        return self.attention + self.state + self.fixed


def kv_groups(geometry: Geometry) -> Groups:
    """The groups of `geometry`, its MTP layers included where tokens are drafted with them."""
    stages = geometry.settings.pipeline_parallel_size
    attention = ceil(geometry.attention_layers / stages) + mtp_layers(geometry)
    state = ceil(geometry.mamba_layers / stages)
    page = geometry.block_size * geometry.attention.page_bytes
    indexer = indexer_page(geometry)
    if indexer:
        return _packed(attention, state, page, geometry.page_bytes, indexer)
    size = min(attention, state)
    if max(attention, state) < 1.5 * size:
        size = max(attention, state)
    bytes_per_block = size * max(page, geometry.page_bytes)
    return Groups(ceil(attention / size), ceil(state / size), 0, bytes_per_block)


def _packed(attention: int, state: int, page: int, state_page: int, indexer: int) -> Groups:
    """Attention and indexer pages side by side in one group; the state fits into its blocks.

    The attention group stays whole, so the state layers are split towards its length, and
    further where a block does not hold as many states. The indexer's rings are a group as well.
    """
    width = attention * (page + indexer)
    repeats = _least_padding([attention, state, attention], attention)
    groups = max(ceil(state / repeats), ceil(state / max(width // state_page, 1)))
    return Groups(1, groups, 1, max(width, ceil(state / groups) * state_page))


def _least_padding(counts: list[int], least: int) -> int:
    """The chunk length from `least` on that pads `counts` least; the longest of equals."""
    return min(range(least, max(counts) + 1), key=lambda d: (sum(-n % d for n in counts), -d))


def indexer_page(geometry: Geometry) -> int:
    """Bytes of a block in one layer's indexer cache (DSA); 0 without an indexer."""
    config = geometry.config
    if not geometry.attention.is_mla or config.get("index_topk") is None:
        return 0
    entries = geometry.block_size // config.integer("index_kpool", 1)
    return entries * (config.integer("index_head_dim", 128) + _INDEXER_HEAD_BYTES)


def mtp_layers(geometry: Geometry) -> int:
    """Attention layers of the model's own MTP head that keep KV beside the model's."""
    method = geometry.settings.speculative_method
    if not geometry.num_speculative_tokens or method not in (None, "mtp"):
        return 0
    config = geometry.config
    pattern = config.text_of("mtp_hybrid_override_pattern")
    # Qwen3-Next names no count for the one it has.
    layers = config.first(
        "mtp_num_hidden_layers",
        "num_nextn_predict_layers",
        default=int(method == "mtp"),
        minimum=0,
    )
    return layers * pattern.count("*") if pattern else layers
