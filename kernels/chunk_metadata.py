"""The chunk lists that linear-attention kernels walk, made on the device in one launch.

Both families cut every sequence of a packed batch into chunks of at most `chunk_size` tokens:

- flash-linear-attention (GDN, KDA) counts from the first token of the query and wants, per chunk,
  the pair (sequence, chunk within it), and per sequence the number of chunks before it;
- Mamba2 (SSD) counts from the first token of the *sequence*, so that states fall on the same
  multiples of `chunk_size` however the prompt was chunked, and ends one more chunk at an internal
  checkpoint; it wants the chunks' token offsets, the sequence of each, and the last one of each.

With the positions a query starts at (zero for the first family) they are one rule, so one kernel
writes whichever of the lists `out` holds. vLLM builds them in Python loops on the host and copies
them to the device (`prepare_chunk_indices` in `third_party/flash_linear_attention/ops/index.py`,
`_compute_chunk_metadata` in `v1/attention/backends/mamba_attn.py`);
`tests/kernels/test_chunk_metadata.py` holds them equal.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl

from chunk_planner.kernels.variants import Variant

#: What a program reads, and writes, at a time. One size for every batch: 1024 masked loads wait no
#: longer than 24, and nothing compiles when a batch grows.
BLOCK_SEQS, BLOCK_CHUNKS = 1024, 128


@dataclass(frozen=True)
class ChunkMetadata:
    """Preallocated outputs of `chunk_metadata`; a list that is None is not made.

    N is the room for chunks (`max_chunks` is always enough), S the number of sequences. Every
    tensor is contiguous, int32 or int64, on the device of the batch. Rows past the last chunk hold
    -1, and the batch's last token offset in `cu_chunk_seqlens`, so a launch over N rows can tell
    them apart and a captured graph can be replayed with fewer chunks.
    """

    # flash-linear-attention
    chunk_indices: torch.Tensor | None = None  # [N, 2]: sequence, chunk within the sequence
    chunk_offsets: torch.Tensor | None = None  # [S + 1]: chunks before each sequence, then all
    # Mamba2
    cu_chunk_seqlens: torch.Tensor | None = None  # [N + 1]: first token of each chunk, then the end
    seq_idx: torch.Tensor | None = None  # [N]: sequence of each chunk
    last_chunk_indices: torch.Tensor | None = None  # [S]: an empty sequence repeats the one before
    checkpoint_chunk_indices: torch.Tensor | None = None  # [S]: chunk ending there, -1 for none


def max_chunks(num_tokens: int, num_seqs: int, chunk_size: int, checkpoints: int = 0) -> int:
    """Room that holds the chunks of any batch of `num_seqs` sequences and `num_tokens` tokens.

    A sequence has at most one short chunk at either end, and a checkpoint adds at most two.
    """
    return num_tokens // chunk_size + 2 * (num_seqs + checkpoints)


def count_chunks(
    query_start_loc: torch.Tensor,
    chunk_size: int,
    num_computed_tokens: torch.Tensor | None = None,
    checkpoint_offsets: torch.Tensor | None = None,
) -> int:
    """How many chunks `chunk_metadata` makes, from the same tensors on the CPU.

    For a caller that has the batch on the host as well and wants lists without spare rows.
    """
    bounds = query_start_loc.numpy()
    num_tokens = bounds[1:] - bounds[:-1]
    start = 0 * num_tokens if num_computed_tokens is None else num_computed_tokens.numpy()
    checkpoint = start if checkpoint_offsets is None else start + checkpoint_offsets.numpy()
    end = start + num_tokens
    before = -(-checkpoint // chunk_size) - start // chunk_size
    behind = -(-end // chunk_size) - checkpoint // chunk_size
    return int((before * (checkpoint > start) + behind * (end > checkpoint)).sum())


def chunk_metadata(
    query_start_loc: torch.Tensor,
    chunk_size: int,
    out: ChunkMetadata,
    num_computed_tokens: torch.Tensor | None = None,
    checkpoint_offsets: torch.Tensor | None = None,
) -> ChunkMetadata:
    """Cut every sequence of a packed batch into chunks; one launch, no host synchronisation.

    Args:
        query_start_loc: [S + 1] int32 or int64, first token of each sequence in the packed batch,
            then the end. Offsets are reported from its first entry, so a slice of a longer batch
            (the prefills behind the decodes) may be passed as it is.
        chunk_size: tokens a chunk may hold.
        out: the lists to write (see `ChunkMetadata`). Chunks beyond its room are dropped; the
            device cannot raise, and `chunk_offsets[-1]` tells.
        num_computed_tokens: [S] position of each query's first token. None counts from the query's
            start, as flash-linear-attention does.
        checkpoint_offsets: [S] tokens into the query after which a chunk must end, 0 for none.

    Returns:
        `out`.

    Raises:
        ValueError: a tensor is not integer, contiguous, of its documented shape or on the device.
    """
    num_seqs, room = _check(
        query_start_loc, chunk_size, out, num_computed_tokens, checkpoint_offsets
    )
    # A program per sequence adds up the chunks before its own: 1024 sequences read 4 MiB from L2
    # in all, which is cheaper than a second launch for the prefix sum. One more program pads.
    chunk_metadata_kernel[(num_seqs + 1,)](
        query_start_loc,
        num_computed_tokens,
        checkpoint_offsets,
        *(getattr(out, field.name) for field in fields(out)),
        num_seqs,
        room,
        CHUNK_SIZE=chunk_size,
        BLOCK_SEQS=BLOCK_SEQS,
        BLOCK_CHUNKS=BLOCK_CHUNKS,
        num_warps=4,
    )
    return out


@triton.jit
def _count_chunks(
    query_start_loc,
    num_computed_tokens,
    checkpoint_offsets,
    rows,
    mask,
    CHUNK_SIZE: tl.constexpr,
):
    """Position, position of the checkpoint, chunks up to it, and all chunks of sequences `rows`.

    Between two positions lie as many chunks as multiples of CHUNK_SIZE are begun. Only built-ins
    here: in the interpreter every call of another jitted function, `tl.cdiv` among them, costs a
    millisecond.
    """
    num_tokens = tl.load(query_start_loc + rows + 1, mask, 0).to(tl.int32)
    num_tokens -= tl.load(query_start_loc + rows, mask, 0).to(tl.int32)
    start = num_tokens * 0
    if num_computed_tokens is not None:
        start += tl.load(num_computed_tokens + rows, mask, 0).to(tl.int32)
    checkpoint = start
    if checkpoint_offsets is not None:
        checkpoint += tl.load(checkpoint_offsets + rows, mask, 0).to(tl.int32)
    end = start + num_tokens
    before = (checkpoint + CHUNK_SIZE - 1) // CHUNK_SIZE - start // CHUNK_SIZE
    before = tl.where(checkpoint > start, before, 0)
    behind = (end + CHUNK_SIZE - 1) // CHUNK_SIZE - checkpoint // CHUNK_SIZE
    return start, checkpoint, before, before + tl.where(end > checkpoint, behind, 0)


# Nothing is specialised on a batch's size or on where a slice begins: a new batch must not compile.
@triton.jit(
    do_not_specialize=["num_seqs", "room"],
    do_not_specialize_on_alignment=["query_start_loc", "num_computed_tokens", "checkpoint_offsets"],
)
def chunk_metadata_kernel(
    query_start_loc,  # [num_seqs + 1]
    num_computed_tokens,  # [num_seqs] or None
    checkpoint_offsets,  # [num_seqs] or None
    chunk_indices,  # [room, 2] or None, like every output
    chunk_offsets,  # [num_seqs + 1]
    cu_chunk_seqlens,  # [room + 1]
    seq_idx,  # [room]
    last_chunk_indices,  # [num_seqs]
    checkpoint_chunk_indices,  # [num_seqs]
    num_seqs,
    room,
    CHUNK_SIZE: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    seq = tl.program_id(0)
    num_before = tl.full([BLOCK_SEQS], 0, tl.int32)  # chunks of the sequences before this one
    for block in range(0, seq, BLOCK_SEQS):
        rows = block + tl.arange(0, BLOCK_SEQS)
        _, _, _, counts = _count_chunks(
            query_start_loc, num_computed_tokens, checkpoint_offsets, rows, rows < seq, CHUNK_SIZE
        )
        num_before += counts
    first = tl.sum(num_before, 0)
    query_start = tl.load(query_start_loc + seq).to(tl.int32)
    query_start -= tl.load(query_start_loc).to(tl.int32)
    if chunk_offsets is not None:
        tl.store(chunk_offsets + seq, first)

    chunks = tl.arange(0, BLOCK_CHUNKS)
    if seq < num_seqs:
        start, checkpoint, before, count = _count_chunks(
            query_start_loc, num_computed_tokens, checkpoint_offsets, seq, True, CHUNK_SIZE
        )
        if last_chunk_indices is not None:
            tl.store(last_chunk_indices + seq, first + count - 1)
        if checkpoint_chunk_indices is not None:
            tl.store(checkpoint_chunk_indices + seq, tl.where(before > 0, first + before - 1, -1))
        for block in range(0, count, BLOCK_CHUNKS):
            chunk = block + chunks
            row = first + chunk
            mask = (chunk < count) & (row < room)
            if chunk_indices is not None:
                tl.store(chunk_indices + 2 * row, seq, mask)
                tl.store(chunk_indices + 2 * row + 1, chunk, mask)
            if seq_idx is not None:
                tl.store(seq_idx + row, seq, mask)
            if cu_chunk_seqlens is not None:
                cut = (start // CHUNK_SIZE + chunk) * CHUNK_SIZE
                cut_behind = (checkpoint // CHUNK_SIZE + chunk - before) * CHUNK_SIZE
                cut = tl.where(
                    chunk < before, tl.maximum(cut, start), tl.maximum(cut_behind, checkpoint)
                )
                tl.store(cu_chunk_seqlens + row, query_start + cut - start, mask)
    else:
        for block in range(first, room + 1, BLOCK_CHUNKS):
            row = block + chunks
            if chunk_indices is not None:
                tl.store(chunk_indices + 2 * row, -1, row < room)
                tl.store(chunk_indices + 2 * row + 1, -1, row < room)
            if seq_idx is not None:
                tl.store(seq_idx + row, -1, row < room)
            if cu_chunk_seqlens is not None:
                tl.store(cu_chunk_seqlens + row, query_start, row <= room)


def chunk_metadata_reference(
    query_start_loc: torch.Tensor,
    chunk_size: int,
    out: ChunkMetadata,
    num_computed_tokens: torch.Tensor | None = None,
    checkpoint_offsets: torch.Tensor | None = None,
) -> ChunkMetadata:
    """`chunk_metadata` as a walk along each sequence on the host."""
    num_seqs, room = _check(
        query_start_loc, chunk_size, out, num_computed_tokens, checkpoint_offsets
    )
    bounds = query_start_loc.tolist()
    positions = [0] * num_seqs if num_computed_tokens is None else num_computed_tokens.tolist()
    checkpoints = [0] * num_seqs if checkpoint_offsets is None else checkpoint_offsets.tolist()
    lists: dict[str, list] = {field.name: [] for field in fields(out)}
    for seq in range(num_seqs):
        num_tokens = bounds[seq + 1] - bounds[seq]
        token, chunk, checkpoint_chunk = 0, 0, -1
        lists["chunk_offsets"].append(len(lists["seq_idx"]))
        while token < num_tokens:
            lists["chunk_indices"].append([seq, chunk])
            lists["seq_idx"].append(seq)
            lists["cu_chunk_seqlens"].append(bounds[seq] - bounds[0] + token)
            stop = token + chunk_size - (positions[seq] + token) % chunk_size
            if token < checkpoints[seq] <= stop:
                stop, checkpoint_chunk = checkpoints[seq], len(lists["seq_idx"]) - 1
            token, chunk = min(stop, num_tokens), chunk + 1
        lists["last_chunk_indices"].append(len(lists["seq_idx"]) - 1)
        lists["checkpoint_chunk_indices"].append(checkpoint_chunk)
    lists["chunk_offsets"].append(len(lists["seq_idx"]))

    spare = max(room - len(lists["seq_idx"]), 0)
    lists["chunk_indices"] += [[-1, -1]] * spare
    lists["seq_idx"] += [-1] * spare
    lists["cu_chunk_seqlens"] += [bounds[-1] - bounds[0]] * (spare + 1)
    for name, values in lists.items():
        tensor = getattr(out, name)
        if tensor is not None:
            # Rows past the room are dropped, as on the device.
            values = torch.tensor(values[: len(tensor)], dtype=tensor.dtype)
            tensor.copy_(values.reshape(tensor.shape))
    return out


def _check(
    query_start_loc: torch.Tensor,
    chunk_size: int,
    out: ChunkMetadata,
    num_computed_tokens: torch.Tensor | None,
    checkpoint_offsets: torch.Tensor | None,
) -> tuple[int, int]:
    """The number of sequences and the room for chunks, from shapes that fit together."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1 token")
    if query_start_loc.ndim != 1 or len(query_start_loc) < 1:
        shape = tuple(query_start_loc.shape)
        raise ValueError(f"query_start_loc has shape {shape}; it must be [sequences + 1]")
    num_seqs = len(query_start_loc) - 1
    rooms = {
        len(tensor) - extra
        for tensor, extra in ((out.chunk_indices, 0), (out.seq_idx, 0), (out.cu_chunk_seqlens, 1))
        if tensor is not None
    }
    if len(rooms) > 1:
        raise ValueError(
            f"the chunk lists of `out` have room for {sorted(rooms)} chunks; make it one"
        )
    room = rooms.pop() if rooms else 0
    shapes = {
        "query_start_loc": (query_start_loc, (num_seqs + 1,)),
        "num_computed_tokens": (num_computed_tokens, (num_seqs,)),
        "checkpoint_offsets": (checkpoint_offsets, (num_seqs,)),
        "out.chunk_indices": (out.chunk_indices, (room, 2)),
        "out.chunk_offsets": (out.chunk_offsets, (num_seqs + 1,)),
        "out.cu_chunk_seqlens": (out.cu_chunk_seqlens, (room + 1,)),
        "out.seq_idx": (out.seq_idx, (room,)),
        "out.last_chunk_indices": (out.last_chunk_indices, (num_seqs,)),
        "out.checkpoint_chunk_indices": (out.checkpoint_chunk_indices, (num_seqs,)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {shape}")
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} is {tensor.dtype}; it must be int32 or int64")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous; pass a contiguous tensor")
        if tensor.device != query_start_loc.device:
            raise ValueError(
                f"{name} is on {tensor.device}, query_start_loc on {query_start_loc.device}; "
                "pass all tensors on one device"
            )
    return num_seqs, room


def _variant(
    name: str, chunk_size: int, absent: tuple[str, ...], wide: tuple[str, ...] = ()
) -> Variant:
    """`wide` tensors are int64, `absent` ones None."""
    inputs = ("query_start_loc", "num_computed_tokens", "checkpoint_offsets")
    outputs = tuple(field.name for field in fields(ChunkMetadata))
    signature = {
        each: ("*i64" if each in wide else "*i32") + ("" if each in inputs else ":16")
        for each in inputs + outputs
        if each not in absent
    }
    constexprs = {"CHUNK_SIZE": chunk_size, "BLOCK_SEQS": BLOCK_SEQS, "BLOCK_CHUNKS": BLOCK_CHUNKS}
    return Variant(
        name=name,
        kernel=chunk_metadata_kernel,
        signature={**signature, "num_seqs": "i32", "room": "i32"},
        constexprs={**constexprs, **dict.fromkeys(absent)},
    )


_MAMBA2 = ("cu_chunk_seqlens", "seq_idx", "last_chunk_indices", "checkpoint_chunk_indices")
_FLA = ("chunk_indices", "chunk_offsets")
_POSITIONS = ("num_computed_tokens", "checkpoint_offsets")
# The last three as vLLM's builders want them: `planner/engine/gpu_metadata.py`.
VARIANTS = [
    _variant("chunk_metadata_everything", 64, ()),
    _variant("chunk_metadata_gdn", 64, _POSITIONS + _MAMBA2, wide=("chunk_offsets",)),
    _variant("chunk_metadata_mamba2", 256, (*_FLA, "checkpoint_offsets", _MAMBA2[-1])),
    _variant("chunk_metadata_mamba2_checkpoints", 256, _FLA, wide=(_MAMBA2[-1],)),
]
