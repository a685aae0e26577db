"""KV cache left at a budget, and whether a request of `max_model_len` fits into it.

What vLLM does at start-up: run one step of the whole budget, take the peak and the weights off
its share of the device, and cut the rest into blocks (`determine_available_memory`,
vllm/v1/worker/gpu_worker.py). The peak is modelled here unless it is given.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

from chunk_planner.errors import PlannerError
from chunk_planner.geometry.groups import Groups, kv_groups
from chunk_planner.geometry.kv_dtype import model_dtype
from chunk_planner.geometry.resolve import Geometry
from chunk_planner.geometry.settings import DTYPE_BYTES
from chunk_planner.geometry.weights import Weights, weights

GIB = 2**30
# A published report (RTX 5090, 64-layer GDN of hidden size 5120, vLLM issue 52872) gives 2.84,
# 2.42 and 2.32 GiB of activation at budgets of 8192, 4096 and 3072, and graph pools of 0.89 and
# 0.52 GiB. Its slope is 107 KiB per token, where hidden + 3 x intermediate gives 112 KiB; what
# is left at budget 0 is 2.0 GiB, where the sampler gives 1.4 GiB at 256 sequences. The rest of
# it, and the graphs, are fitted to that report:
FIXED_BYTES = int(0.5 * GIB)
GRAPH_FIXED_BYTES = int(0.3 * GIB)
GRAPH_SHARE = 0.65
#: logits, their sorted copy, indices, probabilities and cumulated ones, per entry of the vocabulary
SAMPLER_BYTES = 4 + 4 + 8 + 4 + 4


@dataclass(frozen=True)
class MemorySettings:
    """What the device has and, where measured, what a step takes of it; bytes on one device.

    Attributes:
        total_device_bytes: the device's whole memory.
        gpu_memory_utilization: vLLM's share of it.
        weight_bytes: None to take the checkpoint's size or count it.
        activation_bytes_per_token: slope of the peak over the budget; None to model it.
        graph_bytes: CUDA graph pool; None to model it.
        max_num_seqs: sequences the sampler is profiled with.
    """

    total_device_bytes: int
    gpu_memory_utilization: float = 0.92
    weight_bytes: int | None = None
    activation_bytes_per_token: int | None = None
    graph_bytes: int | None = None
    max_num_seqs: int = 256
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.gpu_memory_utilization <= 1:
            raise PlannerError(
                f"gpu_memory_utilization = {self.gpu_memory_utilization} must be above 0 and at "
                "most 1"
            )
        for name in ("total_device_bytes", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise PlannerError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("weight_bytes", "activation_bytes_per_token", "graph_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise PlannerError(f"{name} = {value} must not be negative")


@dataclass(frozen=True)
class KVLeft:
    """The KV cache at one budget; bytes on one rank.

    Attributes:
        kv_tokens: tokens at `max_model_len` per request, as vLLM logs the "KV cache size".
        concurrency: requests of `max_model_len`, as vLLM logs the "maximum concurrency".
        requests_of_max_model_len: how many really run to the end: whole blocks, lookahead, one
            spare block per group, and the null block taken off.
        fits: at least one does.
        blocks_per_request: what such a request needs.
        evidence: "modelled", or "given" where weights and activation were given.
    """

    max_num_batched_tokens: int
    kv_bytes: int
    weight_bytes: int
    activation_bytes: int
    graph_bytes: int
    num_blocks: int
    bytes_per_block: int
    blocks_per_request: int
    max_model_len: int
    kv_tokens: int
    concurrency: float
    requests_of_max_model_len: int
    fits: bool
    formula: str
    evidence: str

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "concurrency": round(self.concurrency, 2)}


def activation_bytes_per_token(geometry: Geometry) -> tuple[int, str]:
    """Modelled slope of a step's peak memory over its tokens, and the formula.

    The widest point of a layer: residual and hidden state, plus a feed-forward part with its
    gate, up and product (or the routed experts' copies), or the mixer's projections.
    """
    config, tp = geometry.config, geometry.settings.tensor_parallel_size
    size = DTYPE_BYTES[model_dtype(config, geometry.settings)]
    hidden = config.integer("hidden_size")
    # Hyper-connections keep several residual streams.
    streams = config.first("hc_mult", "hc_count", default=1)
    inner = config.integer("intermediate_size", 0, minimum=0)
    widest, words = 3 * inner / tp, f"3*{inner}/{tp}"
    top = config.first("num_experts_per_tok", "num_experts_per_token", default=0, minimum=0)
    moe = config.integer("moe_intermediate_size", 0, minimum=0)
    if top and moe:
        # With expert parallelism a rank holds whole experts instead of a slice of each.
        slices = 1 if geometry.settings.enable_expert_parallel else tp
        routed = top * (3 * moe / slices + hidden)
        if routed > widest:
            widest, words = routed, f"{top} experts*(3*{moe}/{slices} + {hidden})"
    residual = f"{streams}*{hidden}" if streams > 1 else f"{hidden}"
    return int(size * (streams * hidden + widest)), f"{size} B x ({residual} + {words})"


def kv_left(geometry: Geometry, memory: MemorySettings, max_num_batched_tokens: int) -> KVLeft:
    """The KV cache left when vLLM is started with this budget (tokens).

    Raises:
        PlannerError: no `max_model_len` known, or weights that cannot be counted.
    """
    length = geometry.max_model_len
    if length is None:
        raise PlannerError(
            f"{geometry.config.source}: max_model_len is unknown; give --max-model-len"
        )
    if max_num_batched_tokens < 1:
        raise PlannerError(f"max_num_batched_tokens = {max_num_batched_tokens} must be at least 1")
    held = (
        weights(geometry)
        if memory.weight_bytes is None
        else Weights(memory.weight_bytes, "as given")
    )
    slope, slope_words = activation_bytes_per_token(geometry)
    modelled = memory.activation_bytes_per_token is None
    if not modelled:
        slope, slope_words = memory.activation_bytes_per_token, "as given"
    vocab = geometry.config.integer("vocab_size", 0)
    sampler = SAMPLER_BYTES * vocab * min(memory.max_num_seqs, max_num_batched_tokens)
    activation = FIXED_BYTES + sampler + slope * max_num_batched_tokens
    graph = memory.graph_bytes
    if graph is None:
        graph = GRAPH_FIXED_BYTES + int(GRAPH_SHARE * slope * max_num_batched_tokens)
        graph = 0 if memory.enforce_eager else graph
    share = int(memory.total_device_bytes * memory.gpu_memory_utilization)
    left = max(0, share - held.bytes - activation - graph)

    groups = kv_groups(geometry)
    blocks = left // groups.bytes_per_block
    logged, needed = blocks_per_request(geometry, groups, length)
    requests = max(0, blocks - 1) // needed
    formula = (
        f"{memory.gpu_memory_utilization:g} x device - weights ({held.source}) - activation "
        f"({FIXED_BYTES / GIB:g} GiB + {SAMPLER_BYTES} B x {vocab} x "
        f"{min(memory.max_num_seqs, max_num_batched_tokens)} sequences + {slope_words} x budget) "
        f"- graphs; {groups.attention} attention, {groups.state} state"
        + (f", {groups.fixed} ring" if groups.fixed else "")
        + f" groups share blocks of {groups.bytes_per_block} B"
    )
    return KVLeft(
        max_num_batched_tokens=max_num_batched_tokens,
        kv_bytes=left,
        weight_bytes=held.bytes,
        activation_bytes=activation,
        graph_bytes=graph,
        num_blocks=blocks,
        bytes_per_block=groups.bytes_per_block,
        blocks_per_request=needed,
        max_model_len=length,
        kv_tokens=int(blocks / logged * length),
        concurrency=blocks / logged,
        requests_of_max_model_len=requests,
        fits=requests >= 1,
        formula=formula,
        evidence="modelled" if modelled or memory.weight_bytes is None else "given",
    )


def blocks_per_request(geometry: Geometry, groups: Groups, length: int) -> tuple[int, int]:
    """Blocks of one request of `length` tokens: as vLLM's log counts them, and as needed.

    The need adds the drafted tokens' lookahead and one spare block per group: with exactly the
    logged number a request starts, but stops or re-prefills once it must grow.
    """
    per_block = geometry.block_size * geometry.settings.decode_context_parallel_size
    states = groups.state * geometry.state_blocks_per_request + groups.fixed
    lookahead = geometry.num_speculative_tokens
    if geometry.settings.speculative_method == "dflash":
        lookahead += 1  # its block of drafts starts with the sampled token
    logged = groups.attention * ceil(length / per_block) + states
    needed = groups.attention * ceil((length + lookahead) / per_block) + states + groups.count
    return logged, needed


def one_block_requests(geometry: Geometry, left: KVLeft) -> int:
    """How many requests of one block each the pool holds at once, at least 1.

    The most requests that can decode beside a prefill, whatever `max_num_seqs` says.
    """
    blocks, _ = blocks_per_request(geometry, kv_groups(geometry), geometry.block_size)
    return max(1, (left.num_blocks - 1) // blocks)
