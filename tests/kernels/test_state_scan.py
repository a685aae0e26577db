"""The chunked state scan against its float64 reference."""

import pytest

torch = pytest.importorskip("torch")

from chunk_planner.kernels.state_scan import (  # noqa: E402
    scan_bytes,
    scan_states,
    scan_states_reference,
)
from chunk_planner.kernels.testing import EXACT_FLOAT32, assert_close, poisoned  # noqa: E402

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


def operands(
    batch, chunks, heads, rows, channels, *, state, device, rule="ssd", tokens=64, products=FLOAT16
):
    """Random decays in (0, 1), updates of size 1, and keys that erase half of a state's size."""
    decay = torch.rand(batch, chunks, heads, *((channels,) if rule == "kda" else ()), device=device)
    update = torch.randn(batch, chunks, heads, rows, channels, device=device)
    initial = torch.randn(batch, heads, rows, channels, device=device).to(state)
    erase = None
    if rule != "ssd":
        scale = (4 * tokens * channels) ** -0.25
        side = (batch, chunks, heads, tokens, channels)
        erase = tuple((scale * torch.randn(side, device=device)).to(products) for _ in range(2))
    return decay, update, initial, erase


def compare(decay, update, initial, erase, every, state, ratio=None):
    """Scan and reference into poisoned outputs, with checkpoints and without."""
    batch, chunks, *inner = update.shape
    for step in (None, every):
        results = []
        for scan in (scan_states, scan_states_reference):
            out = poisoned(*update.shape, dtype=state, device=update.device)
            stored = None
            if step:
                stored = poisoned(batch, chunks // step, *inner, dtype=state, device=update.device)
            scan(decay, update, initial, out, step, stored, erase)
            results.append((out, stored))
        (out, stored), (expected, expected_stored) = results
        assert_close("out", out, expected, ratio)
        if step:
            assert_close("checkpoints", stored, expected_stored, ratio)
            # a checkpoint is the state after its chunk, nothing else
            assert torch.equal(stored, out[:, step - 1 :: step][:, : stored.shape[1]])


CASES = {
    # id: rule, batch, chunks, heads, rows, channels, checkpoint every, state dtype
    "mamba2-1152": ("ssd", 1, 9, 4, 64, 128, 3, FLOAT32),
    "mamba2-63-heads": ("ssd", 1, 4, 63, 16, 32, 2, FLOAT32),
    "mamba2-2096": ("ssd", 1, 17, 2, 80, 128, 17, FLOAT32),
    "mamba2-bf16": ("ssd", 2, 5, 2, 64, 128, 2, BFLOAT16),
    "mamba2-fp16": ("ssd", 2, 5, 2, 64, 128, 2, FLOAT16),
    "odd-dims": ("ssd", 2, 3, 3, 33, 100, 2, FLOAT32),
    "gdn-1151": ("gdn", 1, 18, 2, 32, 128, 18, FLOAT32),
    "gdn-784": ("gdn", 1, 26, 2, 32, 64, 13, FLOAT32),
    "gdn-bf16": ("gdn", 2, 5, 2, 48, 128, 2, BFLOAT16),
    "kda-1152": ("kda", 1, 18, 2, 32, 128, 9, FLOAT32),
    "kda-fp16-odd": ("kda", 2, 5, 3, 33, 60, 1, FLOAT16),
    "checkpoint-beyond-the-end": ("ssd", 1, 3, 2, 16, 32, 5, FLOAT32),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name, device):
    rule, *shape, every, state = CASES[name]
    torch.manual_seed(0)
    decay, update, initial, erase = operands(*shape, state=state, device=device, rule=rule)
    exact = rule == "ssd" and state == FLOAT32
    compare(decay, update, initial, erase, every, state, EXACT_FLOAT32 if exact else None)


@pytest.mark.parametrize("rule", ["gdn", "kda"])
@pytest.mark.parametrize("state", [FLOAT32, BFLOAT16])
def test_products_in_bfloat16(rule, state, device, bfloat16):
    """As launched for a model: the state is rounded twice on its way through the products."""
    torch.manual_seed(2)
    operand = operands(1, 18, 2, 32, 128, state=state, device=device, rule=rule, products=BFLOAT16)
    compare(*operand, every=9, state=state, ratio=8e-3)


def test_short_last_tokens_of_a_delta_chunk(device):
    torch.manual_seed(1)
    operand = operands(1, 3, 2, 32, 64, state=FLOAT32, device=device, rule="gdn", tokens=49)
    compare(*operand, every=2, state=FLOAT32)


def test_no_initial_state_is_zeros(device):
    decay, update, initial, _ = operands(1, 3, 2, 16, 32, state=FLOAT32, device=device)
    out, expected = (poisoned(*update.shape, dtype=FLOAT32, device=device) for _ in range(2))
    scan_states(decay, update, None, out)
    scan_states_reference(decay, update, torch.zeros_like(initial), expected)
    assert_close("out", out, expected, EXACT_FLOAT32)


@pytest.mark.parametrize("batch", [1024, 0])
def test_1024_requests_and_none(batch, device):
    decay, update, initial, _ = operands(batch, 2, 1, 4, 16, state=FLOAT32, device=device)
    out, expected = (poisoned(*update.shape, dtype=FLOAT32, device=device) for _ in range(2))
    scan_states(decay, update, initial, out)
    scan_states_reference(decay, update, initial, expected)
    assert_close("out", out, expected, EXACT_FLOAT32)


def test_checkpoints_into_strided_pages(device):
    """Checkpoints may be a view into a cache whose pages hold more than the state."""
    decay, update, initial, _ = operands(1, 4, 2, 16, 32, state=FLOAT32, device=device)
    pages = poisoned(2, 2 * 16 * 32 + 100, dtype=FLOAT32, device=device)
    stored = pages[:, : 2 * 16 * 32].view(1, 2, 2, 16, 32)
    out = poisoned(*update.shape, dtype=FLOAT32, device=device)
    scan_states(decay, update, initial, out, 2, stored)
    assert torch.equal(stored, out[:, 1::2])
    assert pages[:, 2 * 16 * 32 :].isnan().all()


def test_scan_bytes_counts_each_tensor_once():
    decay, update, initial, erase = operands(
        1, 4, 2, 16, 32, state=FLOAT32, device="cpu", rule="gdn"
    )
    state, decays, side = 2 * 16 * 32 * 4, 4 * 2 * 4, 4 * 2 * 64 * 32 * 2
    assert scan_bytes(decay, update, None, update) == 8 * state + decays
    assert scan_bytes(decay, update, initial, update, 2, update[:, :2]) == 11 * state + decays
    assert scan_bytes(decay, update, None, update, erase=erase) == 8 * state + decays + 2 * side


def test_refuses_what_it_cannot_serve():
    decay, update, initial, erase = operands(
        2, 4, 2, 16, 32, state=FLOAT32, device="cpu", rule="gdn"
    )
    out, stored = torch.empty_like(update), torch.empty(2, 2, 2, 16, 32)
    for change, complaint in (
        ({"update": update[0]}, r"update has shape \(4, 2, 16, 32\)"),
        ({"update": update.double()}, "update is torch.float64"),
        ({"initial": initial[:1]}, "initial has shape"),
        ({"out": out.transpose(-1, -2).contiguous().transpose(-1, -2)}, "out: the last two"),
        ({"out": out[:1].expand_as(out)}, "out has a stride below 1"),
        ({"decay": decay.half()}, "decay is torch.float16"),
        ({"decay": decay[..., None].expand(*decay.shape, 32)}, "decay: its channels, stride 0"),
        ({"checkpoint_every": 2}, "go together"),
        ({"checkpoint_every": 0, "checkpoints": stored}, "checkpoint_every is 0"),
        ({"checkpoint_every": 3, "checkpoints": stored}, "checkpoints has shape"),
        ({"erase": (erase[0], erase[1].float())}, "one dtype is needed"),
        ({"erase": (erase[0], erase[1][..., :16])}, "keys has shape"),
    ):
        arguments = {"decay": decay, "update": update, "initial": initial, "out": out, **change}
        for scan in (scan_states, scan_states_reference):
            with pytest.raises(ValueError, match=complaint):
                scan(**arguments)
