"""How a kernel's result is held against its reference, in tests and before any timing."""

import torch

# Largest root-mean-square error allowed, as a share of the reference's root mean square: a few
# roundings of the type the result is stored in, or of the type a product was taken in (a float32
# product on a GPU is TF32, 10 bits of fraction).
ERROR_RATIOS = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 8e-3}
EXACT_FLOAT32 = 1e-6  # float32 sums without products


def error_ratio(got: torch.Tensor, reference: torch.Tensor) -> float:
    """Root-mean-square error over the root mean square of `reference`, both in float64.

    NaN where `got` has one (an element nobody wrote, if it was `poisoned`) or shapes are empty of
    signal; 0.0 for two empty tensors.
    """
    if got.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(got.shape)} and {tuple(reference.shape)}")
    if got.numel() == 0:
        return 0.0
    got, reference = got.detach().cpu().double(), reference.detach().cpu().double()
    error, size = (got - reference).square().mean().sqrt(), reference.square().mean().sqrt()
    return 0.0 if error == 0 else (error / size).item()


def assert_close(
    name: str, got: torch.Tensor, reference: torch.Tensor, ratio: float | None = None
) -> None:
    """Raises AssertionError if `error_ratio` exceeds `ratio`, or is NaN.

    Args:
        ratio: Default: that of `got`'s dtype in `ERROR_RATIOS`, and for integers and booleans 0.
    """
    if ratio is None:
        ratio = ERROR_RATIOS.get(got.dtype, 0.0)
    unwritten = int(got.isnan().sum()) if got.is_floating_point() else 0
    assert not unwritten, f"{name}: {unwritten} of {got.numel()} elements are NaN"
    error = error_ratio(got, reference)
    assert error <= ratio, f"{name}: error ratio {error:.2e} over {ratio:.0e}"


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor in which an element that nobody writes shows: NaN, or the lowest integer."""
    if dtype.is_floating_point:
        value = float("nan")
    else:
        value = torch.iinfo(dtype).min
    return torch.full(shape, value, dtype=dtype, device=device)
