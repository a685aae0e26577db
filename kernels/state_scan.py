"""Passes recurrent state from chunk to chunk, and stores it at block boundaries on the way.

This is the part of a linear-attention prefill in which a state checkpoint is born. A layer works
through its tokens in chunks of 64 to 256 (the kernel's own, not the scheduler's); each chunk decays
the state and adds to it:

    S[c] = S[c-1] * decay[c] + update[c]                                        Mamba2 (SSD), GLA
    S[c] = S[c-1] * decay[c] - (S[c-1] @ weights[c].T) @ keys[c] + update[c]    delta rule: GDN, KDA

The first is the state passing of Mamba2 (Dao and Gu, arXiv:2405.21060, section 6), the second that
of the gated delta rule in its WY form (Yang et al., arXiv:2412.06464, section 3.3), with each key
decayed to the end of its chunk. In both, a row of S needs nothing of the other rows.

The time with checkpoints minus the time without is what storing them costs, measured.
"""

import torch
import triton
import triton.language as tl

from chunk_planner.kernels.variants import Variant

STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Rows of the state per program. Few, because the chunks of a head follow one another and only rows
# and heads run side by side; with the delta rule at least the 16 that a matrix instruction takes.
BLOCK_ROWS = 16
NUM_WARPS = 4
# Updates of the next chunks are on their way while one is added. Three stages of a delta rule's
# weights and keys take 72 KiB of shared memory, and AMD's gfx942 has 64.
NUM_STAGES = {"cuda": 3, "hip": 2}


def scan_states(
    decay: torch.Tensor,
    update: torch.Tensor,
    initial: torch.Tensor | None,
    out: torch.Tensor,
    checkpoint_every: int | None = None,
    checkpoints: torch.Tensor | None = None,
    erase: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Writes the state after every chunk, and every `checkpoint_every`-th one a second time.

    States are [rows, channels]: Mamba2's head and state dimension, a delta rule's value and key
    dimension. They and `update` may be float32, bfloat16 or float16, strided in any dimension
    before those two; sums are float32. Empty batches are fine.

    Args:
        decay: float32 [batch, chunks, heads], or [batch, chunks, heads, channels] (KDA).
        update: [batch, chunks, heads, rows, channels].
        initial: [batch, heads, rows, channels]. Default: zeros.
        out: [batch, chunks, heads, rows, channels].
        checkpoint_every: Chunks from one checkpoint to the next: block size / chunk size.
        checkpoints: [batch, chunks // checkpoint_every, heads, rows, channels].
        erase: Delta rule only: `weights` and `keys`, [batch, chunks, heads, tokens, channels], of
            one dtype, in which their products are taken.

    Raises:
        ValueError: A shape, dtype, device or stride other than these; the text names the argument.
    """
    _check(decay, update, initial, out, checkpoint_every, checkpoints, erase)
    batch, chunks, heads, rows, channels = update.shape
    if 0 in update.shape:
        return
    weights, keys = erase or (update, update)
    block_channels = max(16, triton.next_power_of_2(channels))
    num_stages = NUM_STAGES["hip" if torch.version.hip else "cuda"]
    grid = (triton.cdiv(rows, BLOCK_ROWS), heads, batch)
    _scan_kernel[grid](
        decay,
        update,
        update if initial is None else initial,
        out,
        update if checkpoints is None else checkpoints,
        weights,
        keys,
        chunks,
        checkpoint_every or 0,
        rows,
        channels,
        weights.shape[3],
        *decay.stride()[:3],
        *update.stride()[:3],
        *((0, 0) if initial is None else initial.stride()[:2]),
        *out.stride()[:3],
        *((0, 0, 0) if checkpoints is None else checkpoints.stride()[:3]),
        *weights.stride()[:3],
        *keys.stride()[:3],
        HAS_INITIAL=initial is not None,
        HAS_CHECKPOINTS=checkpoints is not None,
        PER_CHANNEL=decay.dim() == 4,
        ERASE=erase is not None,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_CHANNELS=block_channels,
        BLOCK_TOKENS=16 if erase is None else max(16, triton.next_power_of_2(weights.shape[3])),
        NUM_STAGES=num_stages,
        num_warps=NUM_WARPS,
        num_stages=num_stages,
    )


def scan_states_reference(
    decay: torch.Tensor,
    update: torch.Tensor,
    initial: torch.Tensor | None,
    out: torch.Tensor,
    checkpoint_every: int | None = None,
    checkpoints: torch.Tensor | None = None,
    erase: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """`scan_states` in float64 PyTorch, rounded once, when a state is written."""
    _check(decay, update, initial, out, checkpoint_every, checkpoints, erase)
    decay = decay.double()
    decay = decay[..., None, :] if decay.dim() == 4 else decay[..., None, None]
    state = torch.zeros_like(update[:, 0], dtype=torch.float64) if initial is None else initial
    state = state.double()
    for chunk in range(update.shape[1]):
        after = state * decay[:, chunk] + update[:, chunk]
        if erase is not None:
            weights, keys = (side[:, chunk].double() for side in erase)
            after -= state @ weights.transpose(-1, -2) @ keys
        state = after
        out[:, chunk] = state
        if checkpoints is not None and (chunk + 1) % checkpoint_every == 0:
            checkpoints[:, chunk // checkpoint_every] = state


def scan_bytes(
    decay: torch.Tensor,
    update: torch.Tensor,
    initial: torch.Tensor | None,
    out: torch.Tensor,
    checkpoint_every: int | None = None,
    checkpoints: torch.Tensor | None = None,
    erase: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> int:
    """Bytes that this call of `scan_states` reads plus those it writes, each once."""
    moved = (decay, update, initial, out, checkpoints, *(erase or ()))
    return sum(tensor.numel() * tensor.element_size() for tensor in moved if tensor is not None)


def _check(decay, update, initial, out, checkpoint_every, checkpoints, erase) -> None:
    if update.dim() != 5:
        raise ValueError(
            f"update has shape {tuple(update.shape)}, not [batch, chunks, heads, rows, channels]"
        )
    batch, chunks, heads, rows, channels = update.shape
    if (checkpoint_every is None) != (checkpoints is None):
        raise ValueError("checkpoint_every and checkpoints go together")
    if checkpoint_every is not None and checkpoint_every < 1:
        raise ValueError(f"checkpoint_every is {checkpoint_every}, not 1 chunk or more")
    shapes = {"update": (update, update.shape), "out": (out, update.shape)}
    if initial is not None:
        shapes["initial"] = (initial, (batch, heads, rows, channels))
    if checkpoints is not None:
        stored = chunks // checkpoint_every
        shapes["checkpoints"] = (checkpoints, (batch, stored, heads, rows, channels))
    if erase is not None:
        weights, keys = erase
        tokens = weights.shape[3] if weights.dim() == 5 else 0
        shapes["weights"] = (weights, (batch, chunks, heads, tokens, channels))
        shapes["keys"] = (keys, (batch, chunks, heads, tokens, channels))
        if weights.dtype != keys.dtype:
            raise ValueError(f"weights are {weights.dtype}, keys {keys.dtype}: one dtype is needed")
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != torch.Size(shape):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(shape)}")
        if tensor.dtype not in STATE_DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, not one of {STATE_DTYPES}")
        inner = (tensor.stride(-2), tensor.stride(-1))
        if tensor.numel() and inner != (tensor.shape[-1], 1):
            raise ValueError(f"{name}: the last two dimensions, strides {inner}, aren't contiguous")
    per_head = (batch, chunks, heads)
    if tuple(decay.shape) not in (per_head, (*per_head, channels)) or decay.dtype != torch.float32:
        raise ValueError(
            f"decay is {decay.dtype} {tuple(decay.shape)}, not float32 {per_head} or"
            f" {(*per_head, channels)}"
        )
    if decay.dim() == 4 and decay.numel() and decay.stride(-1) != 1:
        raise ValueError(f"decay: its channels, stride {decay.stride(-1)}, are not contiguous")
    for name, (tensor, _) in (("decay", (decay, None)), *shapes.items()):
        if tensor.device != update.device:
            raise ValueError(f"{name} is on {tensor.device}, update on {update.device}")
        written = name in ("out", "checkpoints")
        repeats = any(
            stride < 1 and size > 1
            for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        )
        if written and repeats:
            raise ValueError(f"{name} has a stride below 1 in {tensor.stride()}: writes would meet")


# a longer prefill must not compile anew
@triton.jit(do_not_specialize=["chunks", "checkpoint_every", "tokens"])
def _scan_kernel(
    decay_ptr,
    update_ptr,
    initial_ptr,
    out_ptr,
    checkpoints_ptr,
    weights_ptr,
    keys_ptr,
    chunks,
    checkpoint_every,
    rows,
    channels,
    tokens,
    decay_stride_batch,
    decay_stride_chunk,
    decay_stride_head,
    update_stride_batch,
    update_stride_chunk,
    update_stride_head,
    initial_stride_batch,
    initial_stride_head,
    out_stride_batch,
    out_stride_chunk,
    out_stride_head,
    checkpoints_stride_batch,
    checkpoints_stride_chunk,
    checkpoints_stride_head,
    weights_stride_batch,
    weights_stride_chunk,
    weights_stride_head,
    keys_stride_batch,
    keys_stride_chunk,
    keys_stride_head,
    HAS_INITIAL: tl.constexpr,
    HAS_CHECKPOINTS: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    ERASE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    channel = tl.arange(0, BLOCK_CHANNELS)
    tile = row[:, None] * channels + channel[None, :]
    mask = (row < rows)[:, None] & (channel < channels)[None, :]

    decay_ptr += batch * decay_stride_batch + head * decay_stride_head
    update_ptr += batch * update_stride_batch + head * update_stride_head
    out_ptr += batch * out_stride_batch + head * out_stride_head
    if HAS_CHECKPOINTS:
        checkpoints_ptr += batch * checkpoints_stride_batch + head * checkpoints_stride_head
    if ERASE:
        token = tl.arange(0, BLOCK_TOKENS)
        side = token[:, None] * channels + channel[None, :]
        side_mask = (token < tokens)[:, None] & (channel < channels)[None, :]
        weights_ptr += batch * weights_stride_batch + head * weights_stride_head
        keys_ptr += batch * keys_stride_batch + head * keys_stride_head

    if HAS_INITIAL:
        initial_ptr += batch * initial_stride_batch + head * initial_stride_head
        state = tl.load(initial_ptr + tile, mask=mask, other=0.0).to(tl.float32)
    else:
        state = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), dtype=tl.float32)

    for chunk in tl.range(0, chunks, num_stages=NUM_STAGES):
        update = tl.load(update_ptr + tile, mask=mask, other=0.0).to(tl.float32)
        if ERASE:
            weights = tl.load(weights_ptr + side, mask=side_mask, other=0.0)
            keys = tl.load(keys_ptr + side, mask=side_mask, other=0.0)
            old = tl.dot(state.to(weights.dtype), tl.trans(weights))
            update -= tl.dot(old.to(keys.dtype), keys)
            weights_ptr += weights_stride_chunk
            keys_ptr += keys_stride_chunk
        if PER_CHANNEL:
            decay = tl.load(decay_ptr + channel, mask=channel < channels, other=0.0)[None, :]
        else:
            decay = tl.load(decay_ptr)
        state = state * decay + update
        tl.store(out_ptr + tile, state.to(out_ptr.dtype.element_ty), mask=mask)
        if HAS_CHECKPOINTS and (chunk + 1) % checkpoint_every == 0:
            stored = state.to(checkpoints_ptr.dtype.element_ty)
            tl.store(checkpoints_ptr + tile, stored, mask=mask)
            checkpoints_ptr += checkpoints_stride_chunk
        decay_ptr += decay_stride_chunk
        update_ptr += update_stride_chunk
        out_ptr += out_stride_chunk


def _variant(
    name: str, rule: dict[str, bool], checkpoints: bool, state: str, backend: str
) -> Variant:
    """As launched for a model: a delta rule reads and writes chunk states in bfloat16."""
    erase, per_channel = rule["ERASE"], rule["PER_CHANNEL"]
    types = {
        "decay": "fp32",
        "update": "fp32",
        "initial": state,
        "out": "bf16" if erase else state,
        "checkpoints": state,
        "weights": "bf16",
        "keys": "bf16",
    }
    strides = [name for name in _scan_kernel.arg_names if "_stride_" in name]
    signature = {f"{name}_ptr": f"*{type_}:16" for name, type_ in types.items()}
    signature |= dict.fromkeys(("chunks", "checkpoint_every", "tokens"), "i32")
    signature |= dict.fromkeys(("rows", "channels", *strides), "i32:16")
    constexprs = {
        "HAS_INITIAL": True,
        "HAS_CHECKPOINTS": checkpoints,
        **rule,
        "BLOCK_ROWS": BLOCK_ROWS,
        "BLOCK_CHANNELS": 128,
        "BLOCK_TOKENS": 64 if erase else 16,
        "NUM_STAGES": NUM_STAGES[backend],
    }
    if not per_channel:  # one decay per head, which Triton specialises on
        del signature["decay_stride_head"]
        constexprs["decay_stride_head"] = 1
    return Variant(
        name,
        _scan_kernel,
        signature,
        constexprs,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES[backend],
        backend=backend,
        wide=True,
    )


SSD = {"PER_CHANNEL": False, "ERASE": False}
GDN = {"PER_CHANNEL": False, "ERASE": True}
KDA = {"PER_CHANNEL": True, "ERASE": True}

VARIANTS = [
    _variant(
        f"scan_{name}_{state}{'_checkpoints' if checkpoints else ''}",
        rule,
        checkpoints,
        state,
        backend,
    )
    for backend in NUM_STAGES
    for name, rule, state, checkpoints in (
        ("ssd", SSD, "fp32", False),
        ("ssd", SSD, "fp32", True),
        ("ssd", SSD, "bf16", True),
        ("ssd", SSD, "fp16", True),
        ("gdn", GDN, "fp32", False),
        ("gdn", GDN, "fp32", True),
        ("gdn", GDN, "bf16", True),
        ("gdn", GDN, "fp16", True),
        ("kda", KDA, "fp32", False),
        ("kda", KDA, "fp32", True),
        ("kda", KDA, "bf16", True),
    )
]
