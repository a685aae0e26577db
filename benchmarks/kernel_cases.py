"""Copy and scan: what the kernel sweep checks and times of a shape's state checkpoints.

A `check_*` raises AssertionError where a kernel and its reference differ. A `time_*` yields one row
per measurement, as soon as it has it.
"""

from collections.abc import Iterator
from functools import partial

import torch
from kernel_shapes import Shape

from chunk_planner.kernels import timing
from chunk_planner.kernels.state_checkpoint import (
    copy_bytes,
    copy_states,
    copy_states_reference,
)
from chunk_planner.kernels.state_scan import scan_bytes, scan_states, scan_states_reference
from chunk_planner.kernels.testing import assert_close

COPY_REQUESTS = (1, 4, 16, 64)


def check_copy(shape: Shape, device: torch.device) -> None:
    """Copies between distinct blocks, then shifts windows by a token, within a block and across."""
    src, dst, shifts = (
        torch.tensor(values, dtype=torch.int32, device=device)
        for values in ((0, 1, 4), (2, 3, 4), (1, 0, 1))
    )
    pages, table = shape.cache(5, device)
    for shift in (None, shifts):
        before = [page.clone() for page in pages]
        copy_states(table, src, dst, shift)
        got = [page.clone() for page in pages]
        for page, old in zip(pages, before, strict=True):
            page.copy_(old)
        copy_states_reference(table, src, dst, shift)
        for layer, (page, mine) in enumerate(zip(pages, got, strict=True)):
            assert torch.equal(page, mine), f"copy_states, layer {layer}: bytes differ"
            assert shift is not None or not torch.equal(mine, before[layer]), "nothing was copied"


def time_copy(shape: Shape, device: torch.device) -> Iterator[dict[str, object]]:
    """One checkpoint of each of so many requests: every layer's state and window."""
    for requests in COPY_REQUESTS:
        if row := _copy_row(shape, requests, device):
            yield row


def _copy_row(shape: Shape, requests: int, device: torch.device) -> dict[str, object] | None:
    """None where the cache that takes turns does not fit the device."""
    blocks = 2 * requests  # each a source or a destination
    bytes_per_set = blocks * shape.geometry.mamba_layers * shape.geometry.page_bytes
    sets = timing.buffer_sets(bytes_per_set)
    if not timing.fits(sets * bytes_per_set):
        return None
    _, table = shape.cache(sets * blocks, device)
    order = torch.randperm(sets * blocks, device=device).to(torch.int32)
    calls = [partial(copy_states, table, *turn) for turn in order.view(sets, 2, requests)]
    found = timing.time_calls({"copy": calls})["copy"]
    return {
        "kernel": "copy_states",
        "requests": requests,
        **found.row(copy_bytes(table, requests)),
        "price_per_checkpoint_us": round(found.p50_us / requests, 3),
    }


def check_scan(shape: Shape, limit_tokens: int, device: torch.device) -> None:
    """The longest chunk that is timed, every block boundary stored, into NaN."""
    if shape.rule is None:
        return
    blocks = shape.prefill_blocks(limit_tokens)[-1]
    operands = shape.scan_operands(blocks, device)
    stored = shape.checkpoints(blocks, device)
    scan_states(**operands, checkpoint_every=shape.chunks_per_block, checkpoints=stored)
    expected = operands | {"out": torch.full_like(operands["out"], float("nan"))}
    expected_stored = torch.full_like(stored, float("nan"))
    scan_states_reference(
        **expected, checkpoint_every=shape.chunks_per_block, checkpoints=expected_stored
    )
    # with the delta rule, products are taken in bfloat16 whatever the state is stored in
    ratio = 8e-3 if shape.rule != "ssd" else None
    assert_close(f"scan_states ({shape.rule}): out", operands["out"], expected["out"], ratio)
    assert_close(f"scan_states ({shape.rule}): checkpoints", stored, expected_stored, ratio)


def time_scan(shape: Shape, limit_tokens: int, device: torch.device) -> Iterator[dict[str, object]]:
    """One layer's scan over a chunk of n blocks, without checkpoints and with n of them."""
    if shape.rule is not None:
        for blocks in shape.prefill_blocks(limit_tokens):
            yield _scan_row(shape, blocks, device)


def _scan_row(shape: Shape, blocks: int, device: torch.device) -> dict[str, object]:
    def turn():
        return shape.scan_operands(blocks, device), shape.checkpoints(blocks, device)

    operands, stored = turn()
    moved, stored_bytes = scan_bytes(**operands), stored.numel() * stored.element_size()
    turns = [turn() for _ in range(timing.buffer_sets(moved + stored_bytes))]
    boundary = {"checkpoint_every": shape.chunks_per_block}
    found = timing.time_calls(
        {
            "without": [partial(scan_states, **ops) for ops, _ in turns],
            "with": [
                partial(scan_states, **ops, **boundary, checkpoints=room) for ops, room in turns
            ],
        }
    )
    price = (found["with"].p50_us - found["without"].p50_us) / blocks
    return {
        "kernel": f"scan_states ({shape.rule})",
        "chunk_tokens": blocks * shape.geometry.block_size,
        "checkpoints": blocks,
        "without_checkpoints": found["without"].row(moved),
        "with_checkpoints": found["with"].row(moved + stored_bytes),
        "price_per_checkpoint_layer_us": round(price, 3),
        "price_per_checkpoint_us": round(shape.geometry.mamba_layers * price, 3),
    }
