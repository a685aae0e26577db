"""The comparison that every kernel test and the sweep's check rely on."""

import pytest

torch = pytest.importorskip("torch")

from chunk_planner.kernels.testing import assert_close, error_ratio, poisoned  # noqa: E402


def test_ratio_is_error_over_signal():
    reference = torch.tensor([3.0, 4.0])
    assert error_ratio(reference + torch.tensor([0.3, 0.4]), reference) == pytest.approx(0.1)
    assert error_ratio(torch.zeros(0), torch.zeros(0)) == 0.0
    assert error_ratio(torch.zeros(3), torch.zeros(3)) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_unwritten_element_fails(dtype):
    got = torch.ones(1000, dtype=dtype)
    assert_close("whole", got, torch.ones(1000))
    got[17] = poisoned(1, dtype=dtype)
    with pytest.raises(AssertionError, match="hole: 1 of 1000 elements are NaN"):
        assert_close("hole", got, torch.ones(1000))


def test_nan_in_the_reference_never_passes():
    with pytest.raises(AssertionError):
        assert_close("nan", torch.ones(4), torch.full((4,), float("nan")))


def test_an_error_over_the_ratio_fails():
    reference = torch.ones(1000)
    assert_close("near", reference + 1e-3, reference)
    with pytest.raises(AssertionError, match=r"far: error ratio 1\.00e-02"):
        assert_close("far", reference + 1e-2, reference)
    with pytest.raises(ValueError, match="shapes differ"):
        assert_close("shape", reference, reference[:1])


def test_integers_must_be_equal():
    reference = torch.arange(8, dtype=torch.int32)
    assert_close("equal", reference.clone(), reference)
    with pytest.raises(AssertionError, match="poison"):
        assert_close("poison", poisoned(8, dtype=torch.int32), reference)
