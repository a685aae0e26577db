"""The checkpoint copy against its reference, byte for byte."""

import pytest

torch = pytest.importorskip("torch")

from chunk_planner.kernels.state_checkpoint import (  # noqa: E402
    TILE_BYTES,
    StateTable,
    copy_bytes,
    copy_states,
    copy_states_reference,
)

BLOCKS = 7


def paged(shape, dtype, *, pages, offset, device):
    """A state [BLOCKS, *shape] that begins `offset` bytes into each page of a byte buffer."""
    size = torch.empty((), dtype=dtype).element_size()
    inner = torch.empty(shape).stride()
    page_bytes = pages.shape[1]
    flat = pages.view(-1).view(dtype)
    return flat.as_strided((BLOCKS, *shape), (page_bytes // size, *inner), offset // size)


def random_bytes(*shape, device):
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def layers(window, state, dtype, device, count=2, page_slack=0):
    """`count` layers as vLLM lays them out: the window, then the state, in one page per block."""
    window_bytes = 2 * torch.Size(window).numel()
    state_bytes = torch.empty((), dtype=dtype).element_size() * torch.Size(state).numel()
    buffers, states = [], []
    for _ in range(count):
        pages = random_bytes(BLOCKS, window_bytes + state_bytes + page_slack, device=device)
        buffers.append(pages)
        states += [
            paged(window, torch.bfloat16, pages=pages, offset=0, device=device),
            paged(state, dtype, pages=pages, offset=window_bytes, device=device),
        ]
    return buffers, states, [True, False] * count


def blocks(*values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def check(buffers, states, windows, src, dst, shifts=None):
    """Runs kernel and reference on the same bytes; whole buffers must agree, gaps included."""
    table = StateTable.build(states, windows)
    before = [buffer.clone() for buffer in buffers]
    copy_states(table, src, dst, shifts)
    got = [buffer.clone() for buffer in buffers]
    for buffer, old in zip(buffers, before, strict=True):
        buffer.copy_(old)
    copy_states_reference(table, src, dst, shifts)
    for i, (mine, reference) in enumerate(zip(got, buffers, strict=True)):
        assert torch.equal(mine, reference), f"buffer {i} differs"
    return before, got


SHAPES = {
    "gdn": ((3, 1536), (8, 128, 64), torch.float32, 0),
    "bf16": ((3, 1536), (8, 128, 64), torch.bfloat16, 0),
    "fp16": ((3, 512), (4, 64, 64), torch.float16, 0),
    "63-heads": ((3, 63 * 8), (63, 33, 8), torch.float32, 0),
    "padded-page": ((3, 512), (4, 32, 64), torch.float32, 112),
    "tail": ((1, 64), (1, 1, TILE_BYTES // 4 + 3), torch.float32, 4),
    "unaligned-page": ((4, 63), (5, 7, 9), torch.bfloat16, 2),
    "speculative-window": ((6, 512), (4, 32, 32), torch.float32, 0),
}


@pytest.mark.parametrize("name", SHAPES)
def test_copies_every_state(name, device):
    window, state, dtype, slack = SHAPES[name]
    buffers, states, windows = layers(window, state, dtype, device, page_slack=slack)
    before, got = check(
        buffers, states, windows, blocks(0, 4, 6, device=device), blocks(1, 2, 5, device=device)
    )
    assert not torch.equal(before[0], got[0])


@pytest.mark.parametrize("name", ["gdn", "unaligned-page", "speculative-window"])
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_shifts_windows_within_a_block_and_across(name, shift, device):
    window, state, dtype, slack = SHAPES[name]
    buffers, states, windows = layers(window, state, dtype, device, page_slack=slack)
    src, dst = blocks(3, 0, device=device), blocks(3, 5, device=device)
    check(buffers, states, windows, src, dst, blocks(shift, shift, device=device))


def test_a_shift_leaves_the_end_of_the_window_and_every_recurrent_state(device):
    window = torch.arange(2 * 4 * 8, dtype=torch.float32, device=device).view(2, 4, 8)
    state = torch.arange(2 * 4 * 8, dtype=torch.float32, device=device).view(2, 4, 8)
    expected = window.clone()
    expected[1, :3] = window[1, 1:]
    table = StateTable.build([window, state], [True, False])
    one = blocks(1, device=device)
    copy_states(table, one, one, one)
    assert torch.equal(window, expected)
    assert torch.equal(state, torch.arange(64.0, device=device).view(2, 4, 8))


def test_a_negative_block_skips_the_request(device):
    buffers, states, windows = layers((3, 64), (2, 8, 8), torch.float32, device)
    src, dst = blocks(-1, 0, 3, device=device), blocks(1, -1, 4, device=device)
    before, got = check(buffers, states, windows, src, dst)
    for old, new in zip(before, got, strict=True):
        changed = [i for i in range(BLOCKS) if not torch.equal(old[i], new[i])]
        assert changed == [4]


def test_layers_with_block_tables_of_their_own(device):
    buffers, states, windows = layers((3, 64), (2, 8, 8), torch.float32, device)
    src = torch.tensor([[0, 1], [0, 1], [2, 3], [2, 3]], dtype=torch.int32, device=device)
    check(buffers, states, windows, src, 6 - src)


def test_empty_batch_and_one_request(device):
    buffers, states, windows = layers((3, 64), (2, 8, 8), torch.float32, device)
    none = blocks(device=device)
    before, got = check(buffers, states, windows, none, none)
    assert all(torch.equal(a, b) for a, b in zip(before, got, strict=True))
    check(buffers, states, windows, blocks(2, device=device), blocks(0, device=device))


def test_1024_requests(device):
    state = torch.randn(2048, 3, 8, device=device)
    order = torch.randperm(2048, device=device).to(torch.int32)
    expected = state.clone()
    expected[order[1024:].long()] = state[order[:1024].long()]
    copy_states([state], order[:1024], order[1024:])
    assert torch.equal(state, expected)


def test_bytes_count_reads_and_writes():
    states = [torch.zeros(4, 3, 512, dtype=torch.bfloat16), torch.zeros(4, 2, 8, 8)]
    assert copy_bytes(states) == 2 * (3 * 512 * 2 + 2 * 8 * 8 * 4)
    assert copy_bytes(StateTable.build(states), requests=3) == 3 * copy_bytes(states)


@pytest.mark.parametrize(
    ("state", "window", "complaint"),
    [
        (torch.zeros(4).expand(6, 4), False, "overlap at a stride of 0"),
        (torch.zeros(32).as_strided((6, 8), (4, 1)), False, "overlap at a stride of 16"),
        (torch.zeros(6, 4, 8).transpose(1, 2), False, "not contiguous"),
        (torch.zeros(6, 4, 8, 2), True, r"not \[num_blocks, tokens, channels\]"),
        (torch.zeros(6), False, r"not \[num_blocks, ...\]"),
    ],
    ids=["stride-0", "overlapping", "transposed", "4d-window", "1d"],
)
def test_refuses_states_it_would_corrupt(state, window, complaint):
    with pytest.raises(ValueError, match=complaint):
        StateTable.build([state], [window])


def test_refuses_no_states_and_wrong_lists():
    with pytest.raises(ValueError, match="states is empty"):
        StateTable.build([])
    states = [torch.zeros(4, 8)]
    good = torch.zeros(3, dtype=torch.int32)
    for src, dst, shifts, complaint in (
        (good.long(), good, None, "src_blocks is torch.int64"),
        (good, good[:2], None, "dst_blocks has shape"),
        (good, torch.zeros(2, 3, dtype=torch.int32), None, "dst_blocks has shape"),
        (good, good, good[:1], "shifts has shape"),
        (torch.zeros(6, dtype=torch.int32)[::2], good, None, "src_blocks has a stride of 2"),
    ):
        with pytest.raises(ValueError, match=complaint):
            copy_states(states, src, dst, shifts)
