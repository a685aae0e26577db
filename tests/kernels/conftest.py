"""Where the kernels of this folder's tests run: on a GPU, or in Triton's interpreter."""

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def device() -> str:
    """ "cpu" under TRITON_INTERPRET=1 (it must be set before Triton is imported), else "cuda"."""
    torch = pytest.importorskip("torch")
    if INTERPRETED:
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set")
    return "cuda"
