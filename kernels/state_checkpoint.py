"""Copies the state of every linear-attention layer between cache blocks in one launch.

A state checkpoint of one request is, per layer, its recurrent state and its convolution window: 40
to 140 pieces of 6 KiB to 4 MiB. One launch copies them all. A table on the device holds where each
state lives, a second one cuts the states into tiles of equal size, one for each program, so that
small and large pieces keep the GPU equally busy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from chunk_planner.kernels.variants import Variant

# 32 KiB a program at 8 warps is 128 bytes a thread: eight 16-byte loads in flight before the first
# store, in 32 of its registers.
TILE_BYTES = 32768
NUM_WARPS = 8
VECTOR_BYTES = 16
BYTES_AT_ONCE = 2048  # of a state that no vector access can reach


@dataclass(frozen=True)
class StateTable:
    """Where the states live, on the device: built once per engine, read by every launch.

    Args:
        states: The tensors described, held so that their memory is.
        windows: Per state, whether it is a convolution window (see `copy_states`).
        table: int64 [num_states, 6]: address, bytes between blocks, bytes of one row, rows of one
            block (a window's tokens, else 1), 1 for a window, 1 if every row starts on a 16-byte
            boundary.
        tiles: int32 [num_tiles, 2]: state, byte in its row at which the tile begins.
    """

    states: tuple[torch.Tensor, ...]
    windows: tuple[bool, ...]
    table: torch.Tensor
    tiles: torch.Tensor

    @classmethod
    def build(
        cls, states: Sequence[torch.Tensor], windows: Sequence[bool] | None = None
    ) -> "StateTable":
        """Describes `states`, one tensor [num_blocks, ...] per layer and kind.

        Blocks may lie in strided pages (vLLM keeps window and state of a layer in one page); what
        is inside a block must be contiguous.

        Args:
            states: On one device, any dtypes.
            windows: Which of them are convolution windows [num_blocks, tokens, channels], vLLM's
                default layout "SD". Default: none.

        Raises:
            ValueError: No states, mixed devices, overlapping blocks (a stride of 0 or less
                included), a block that is not contiguous, or a window without its three dimensions.
        """
        states = tuple(states)
        windows = (False,) * len(states) if windows is None else tuple(windows)
        if not states:
            raise ValueError("states is empty: give one tensor per layer and kind")
        if len(windows) != len(states):
            raise ValueError(f"windows has {len(windows)} entries for {len(states)} states")
        rows = [
            _describe(i, state, window, states[0].device)
            for i, (state, window) in enumerate(zip(states, windows, strict=True))
        ]
        tiles = [(i, start) for i, row in enumerate(rows) for start in range(0, row[2], TILE_BYTES)]
        device = states[0].device
        return cls(
            states,
            windows,
            torch.tensor(rows, dtype=torch.int64, device=device),
            torch.tensor(tiles, dtype=torch.int32, device=device).reshape(-1, 2),
        )


def _describe(
    index: int, state: torch.Tensor, window: bool, device: torch.device
) -> tuple[int, ...]:
    """One row of `StateTable.table`."""
    where = f"states[{index}] {tuple(state.shape)}"
    if state.device != device:
        raise ValueError(f"{where} is on {state.device}, states[0] on {device}")
    if state.dim() < 2 or (window and state.dim() != 3):
        shape = "[num_blocks, tokens, channels]" if window else "[num_blocks, ...]"
        raise ValueError(f"{where} is not {shape}")
    if state.shape[0] and not state[0].is_contiguous():
        raise ValueError(f"{where}: a block with strides {state.stride()[1:]} is not contiguous")
    size = state.element_size()
    block_bytes = state.shape[1:].numel() * size
    stride = state.stride(0) * size
    if state.shape[0] > 1 and stride < block_bytes:
        raise ValueError(
            f"{where}: blocks of {block_bytes} bytes overlap at a stride of {stride} bytes"
        )
    rows = state.shape[1] if window else 1
    row_bytes = block_bytes // rows if rows else 0
    starts = (state.data_ptr(), stride, row_bytes if rows > 1 else 0)
    aligned = all(start % VECTOR_BYTES == 0 for start in starts)
    return state.data_ptr(), stride, row_bytes, rows, int(window), int(aligned)


def copy_states(
    states: StateTable | Sequence[torch.Tensor],
    src_blocks: torch.Tensor,
    dst_blocks: torch.Tensor,
    shifts: torch.Tensor | None = None,
) -> None:
    """Copies every state from block `src_blocks[r]` to block `dst_blocks[r]`, for each request r.

    Convolution windows may move on the way: with a shift of s tokens, the window's tokens from s on
    land at its beginning, and its last s tokens stay what they were (what vLLM does once s drafted
    tokens were accepted). Source and destination may then be the same block. No other block may be
    a source and a destination of one call.

    Args:
        states: Tensors [num_blocks, ...] as for `StateTable.build`, or the table itself, which a
            caller on a hot path (and one that captures a CUDA graph) keeps, because building it
            copies to the device.
        src_blocks: int32 [requests], or [num_states, requests] where the layers have block tables
            of their own. A negative block skips the request, so that a captured graph serves
            every step.
        dst_blocks: Likewise.
        shifts: int32 [requests], 0 to the window's tokens, for windows only. Default: 0.

    Raises:
        ValueError: As `StateTable.build`, or block lists of another shape, dtype or device.
    """
    states = states if isinstance(states, StateTable) else StateTable.build(states)
    src_blocks, dst_blocks, shifts = _check_blocks(states, src_blocks, dst_blocks, shifts)
    requests = src_blocks.shape[1]
    if requests == 0 or len(states.tiles) == 0:
        return
    _copy_states_kernel[(len(states.tiles), requests)](
        states.table,
        states.tiles,
        src_blocks,
        dst_blocks,
        src_blocks if shifts is None else shifts,
        src_blocks.stride(0),
        dst_blocks.stride(0),
        HAS_SHIFTS=shifts is not None,
        TILE_BYTES=TILE_BYTES,
        BYTES_AT_ONCE=BYTES_AT_ONCE,
        num_warps=NUM_WARPS,
        num_stages=1,
    )


def copy_states_reference(
    states: StateTable | Sequence[torch.Tensor],
    src_blocks: torch.Tensor,
    dst_blocks: torch.Tensor,
    shifts: torch.Tensor | None = None,
) -> None:
    """`copy_states` in plain PyTorch."""
    states = states if isinstance(states, StateTable) else StateTable.build(states)
    src_blocks, dst_blocks, shifts = _check_blocks(states, src_blocks, dst_blocks, shifts)
    shift_of = [0] * src_blocks.shape[1] if shifts is None else shifts.tolist()
    for i, (state, window) in enumerate(zip(states.states, states.windows, strict=True)):
        moves = zip(src_blocks[i].tolist(), dst_blocks[i].tolist(), shift_of, strict=True)
        for src, dst, shift in moves:
            if src < 0 or dst < 0:
                continue
            if window:
                state[dst, : state.shape[1] - shift] = state[src, shift:].clone()
            else:
                state[dst] = state[src]


def copy_bytes(states: StateTable | Sequence[torch.Tensor], requests: int = 1) -> int:
    """Bytes that `copy_states` reads plus those it writes for `requests` requests (no shifts)."""
    tensors = states.states if isinstance(states, StateTable) else states
    block_bytes = sum(s.shape[1:].numel() * s.element_size() for s in tensors)
    return 2 * requests * block_bytes


def _check_blocks(
    states: StateTable,
    src_blocks: torch.Tensor,
    dst_blocks: torch.Tensor,
    shifts: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The block lists as [num_states, requests] views, and the shifts."""
    num_states, requests = len(states.states), src_blocks.shape[-1]
    named = {"src_blocks": src_blocks, "dst_blocks": dst_blocks}
    if shifts is not None:
        named["shifts"] = shifts
    for name, blocks in named.items():
        shapes = [(requests,)] if name == "shifts" else [(requests,), (num_states, requests)]
        if tuple(blocks.shape) not in shapes:
            raise ValueError(f"{name} has shape {tuple(blocks.shape)}, not one of {shapes}")
        if blocks.dtype != torch.int32 or blocks.device != states.table.device:
            raise ValueError(
                f"{name} is {blocks.dtype} on {blocks.device}, not torch.int32 on"
                f" {states.table.device}"
            )
        if requests > 1 and blocks.stride(-1) != 1:
            raise ValueError(f"{name} has a stride of {blocks.stride(-1)} between requests, not 1")
    src_blocks, dst_blocks = (
        blocks.expand(num_states, requests) for blocks in (src_blocks, dst_blocks)
    )
    return src_blocks, dst_blocks, shifts


# Neither where a slice of a block list begins nor how many requests it has may compile anew.
@triton.jit(
    do_not_specialize=["src_blocks_stride", "dst_blocks_stride"],
    do_not_specialize_on_alignment=["src_blocks_ptr", "dst_blocks_ptr", "shifts_ptr"],
)
def _copy_states_kernel(
    table_ptr,
    tiles_ptr,
    src_blocks_ptr,
    dst_blocks_ptr,
    shifts_ptr,
    src_blocks_stride,
    dst_blocks_stride,
    HAS_SHIFTS: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    BYTES_AT_ONCE: tl.constexpr,
):
    request = tl.program_id(1)
    state = tl.load(tiles_ptr + 2 * tl.program_id(0))
    start = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    src_block = tl.load(src_blocks_ptr + state * src_blocks_stride + request).to(tl.int64)
    dst_block = tl.load(dst_blocks_ptr + state * dst_blocks_stride + request).to(tl.int64)
    row_of_table = table_ptr + 6 * state
    address = tl.load(row_of_table) + start
    block_stride = tl.load(row_of_table + 1)
    row_bytes = tl.load(row_of_table + 2)
    rows = tl.load(row_of_table + 3)
    window = tl.load(row_of_table + 4)
    aligned = tl.load(row_of_table + 5)

    src = address + src_block * block_stride
    dst = address + dst_block * block_stride
    if HAS_SHIFTS:
        shift = window * tl.load(shifts_ptr + request)
        src += shift * row_bytes
        rows -= shift
    if src_block < 0 or dst_block < 0:
        rows *= 0

    # Rows go in order and a thread holds the same bytes of each, so what a left shift inside one
    # block overwrites has been read by then, by the thread that overwrites it: no barrier needed.
    # Other programs hold other columns.
    num_bytes = tl.minimum(row_bytes - start, TILE_BYTES)
    if aligned:
        num_words = num_bytes // 16 * 4
        words = tl.arange(0, TILE_BYTES // 4)
        tail = num_words * 4 + tl.arange(0, 16)
        for _ in range(rows):
            _move(src, dst, words, words < num_words, tl.int32, 16)
            _move(src, dst, tail, tail < num_bytes, tl.int8, 1)
            src += row_bytes
            dst += row_bytes
    else:
        for _ in range(rows):
            for first in range(0, num_bytes, BYTES_AT_ONCE):
                part = first + tl.arange(0, BYTES_AT_ONCE)
                _move(src, dst, part, part < num_bytes, tl.int8, 1)
            src += row_bytes
            dst += row_bytes


@triton.jit
def _move(src, dst, offsets, mask, TYPE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Copies the elements at `offsets` from address to address, both multiples of `ALIGNMENT`."""
    src_ptr = tl.multiple_of(src.to(tl.pointer_type(TYPE)), ALIGNMENT)
    dst_ptr = tl.multiple_of(dst.to(tl.pointer_type(TYPE)), ALIGNMENT)
    tl.store(dst_ptr + offsets, tl.load(src_ptr + offsets, mask=mask), mask=mask)


VARIANTS = [
    Variant(
        f"copy_states{suffix}",
        _copy_states_kernel,
        {
            "table_ptr": "*i64:16",
            "tiles_ptr": "*i32:16",
            "src_blocks_ptr": "*i32",
            "dst_blocks_ptr": "*i32",
            "shifts_ptr": "*i32",
            "src_blocks_stride": "i32",
            "dst_blocks_stride": "i32",
        },
        {
            "HAS_SHIFTS": has_shifts,
            "TILE_BYTES": TILE_BYTES,
            "BYTES_AT_ONCE": BYTES_AT_ONCE,
        },
        num_warps=NUM_WARPS,
        wide=True,
    )
    for suffix, has_shifts in (("", False), ("_shifted", True))
]
