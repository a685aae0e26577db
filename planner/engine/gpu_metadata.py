"""Let vLLM's linear-attention metadata builders take their chunk lists from the device.

Per prefill step the GDN builder makes flash-linear-attention's (sequence, chunk) pairs, the Mamba2
builder its chunk offsets and indices: Python loops on the CPU, then copies. With
`CHUNK_PLANNER_GPU_METADATA=1` one kernel launch makes the same tensors from `query_start_loc`,
which is on the device already; the host only counts the chunks, to size the lists. Off by default.
"""

import functools
import logging
import os

import torch
import vllm
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder

from chunk_planner.engine.plugin import LOGGER_NAME, guarded
from chunk_planner.errors import PlannerError
from chunk_planner.kernels.chunk_metadata import (
    ChunkMetadata,
    chunk_metadata,
    chunk_metadata_reference,
    count_chunks,
)
from chunk_planner.rule import find_release

#: Releases whose Mamba2 builder also ends a chunk at an internal checkpoint, and returns where.
_WITHOUT_CHECKPOINTS = ("0.30", "0.31")


def install() -> bool:
    """Replace the list making of both builders; whether it was. Installing twice changes nothing.

    A release whose builders are not known is left alone, and one line in vLLM's log says so.
    """
    logger = logging.getLogger(LOGGER_NAME)
    try:
        release = find_release(vllm.__version__)
        gdn = GDNAttentionMetadataBuilder._build_chunk_metadata
        mamba2 = Mamba2AttentionMetadataBuilder._build_chunk_metadata_tensors
    except (PlannerError, AttributeError) as error:
        logger.warning(
            "CHUNK_PLANNER_GPU_METADATA is ignored, vLLM builds its own lists: %s", error
        )
        return False
    if getattr(gdn, "_chunk_planner", False):
        return True
    with_checkpoints = release.version not in _WITHOUT_CHECKPOINTS

    # What fails here must not fail the step: it is logged once, the engine builds its own lists.
    own_gdn, own_mamba2 = guarded(gdn_lists), guarded(mamba2_lists)

    @functools.wraps(gdn)
    def _build_chunk_metadata(self, query_start_loc, query_start_loc_cpu, device):
        lists = None
        # CuTe DSL has lists of its own, made on the device already.
        if getattr(self, "gdn_prefill_backend", None) != "cutedsl":
            lists = own_gdn(query_start_loc, query_start_loc_cpu)
        return gdn(self, query_start_loc, query_start_loc_cpu, device) if lists is None else lists

    @functools.wraps(mamba2)
    def _build_chunk_metadata_tensors(self, chunk_size, common, batch, *checkpoint_offsets):
        offsets = checkpoint_offsets[0] if checkpoint_offsets else None
        lists = own_mamba2(chunk_size, common.num_prefills, batch, offsets)
        if lists is None:
            return mamba2(self, chunk_size, common, batch, *checkpoint_offsets)
        return lists if with_checkpoints else lists[:3]

    _build_chunk_metadata._chunk_planner = True
    GDNAttentionMetadataBuilder._build_chunk_metadata = _build_chunk_metadata
    Mamba2AttentionMetadataBuilder._build_chunk_metadata_tensors = _build_chunk_metadata_tensors
    logger.info("GDN and Mamba2 chunk lists are made on the device")
    return True


def gdn_lists(
    query_start_loc: torch.Tensor, query_start_loc_cpu: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `GDNAttentionMetadataBuilder._build_chunk_metadata` returns for S prefills.

    Returns:
        chunk_indices [N, 2] in the dtype of `query_start_loc`, chunk_offsets [S + 1] int64.
    """
    from vllm.third_party.flash_linear_attention.ops.utils import FLA_CHUNK_SIZE

    device, num_seqs = query_start_loc.device, len(query_start_loc) - 1
    num_chunks = count_chunks(query_start_loc_cpu, FLA_CHUNK_SIZE)
    out = ChunkMetadata(
        chunk_indices=torch.empty(num_chunks, 2, dtype=query_start_loc.dtype, device=device),
        chunk_offsets=torch.empty(num_seqs + 1, dtype=torch.int64, device=device),
    )
    _make(query_start_loc, FLA_CHUNK_SIZE, out)
    return out.chunk_indices, out.chunk_offsets


def mamba2_lists(
    chunk_size: int, num_prefills: int, batch, checkpoint_offsets: list[int] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What `Mamba2AttentionMetadataBuilder._build_chunk_metadata_tensors` returns.

    Args:
        chunk_size: tokens of an SSD chunk.
        num_prefills: the last rows of the batch, decodes come first.
        batch: vLLM's `CommonAttentionMetadata`.
        checkpoint_offsets: per prefill, tokens into its query where a chunk must end, 0 for none.

    Returns:
        cu_chunk_seqlens [N + 1], seq_idx [N], last_chunk_indices [prefills], all int32; and where
        any prefill has a checkpoint, the chunk that ends there, [prefills] int64, 0 for none.
    """
    device = batch.query_start_loc.device
    query_start_loc_cpu = batch.query_start_loc_cpu[-num_prefills - 1 :]
    # Exact for prefills, in asynchronous scheduling too.
    ends_cpu = batch.seq_lens_cpu_upper_bound[batch.num_reqs - num_prefills : batch.num_reqs]
    offsets_cpu = None
    if checkpoint_offsets is not None and any(checkpoint_offsets):
        offsets_cpu = torch.tensor(
            checkpoint_offsets, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
    num_chunks = count_chunks(
        query_start_loc_cpu, chunk_size, ends_cpu - query_start_loc_cpu.diff(), offsets_cpu
    )

    def empty(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    out = ChunkMetadata(
        cu_chunk_seqlens=empty(num_chunks + 1),
        seq_idx=empty(num_chunks),
        last_chunk_indices=empty(num_prefills),
        checkpoint_chunk_indices=None if offsets_cpu is None else empty(num_prefills, torch.int64),
    )
    computed = batch.compute_num_computed_tokens()
    _make(
        batch.query_start_loc[-num_prefills - 1 :],
        chunk_size,
        out,
        computed[batch.num_reqs - num_prefills : batch.num_reqs],
        None if offsets_cpu is None else offsets_cpu.to(device, non_blocking=True),
    )
    at_checkpoint = out.checkpoint_chunk_indices
    if at_checkpoint is not None:
        at_checkpoint.clamp_(min=0)
    return out.cu_chunk_seqlens, out.seq_idx, out.last_chunk_indices, at_checkpoint


def _make(query_start_loc: torch.Tensor, chunk_size: int, out: ChunkMetadata, *inputs) -> None:
    """The kernel, or where Triton has no back end, as on a CPU, its reference."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    on_device = query_start_loc.device.type == "cuda" or interpreted
    run = chunk_metadata if on_device else chunk_metadata_reference
    run(query_start_loc, chunk_size, out, *inputs)
