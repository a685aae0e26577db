"""Where the kernels of this folder's tests run: on a GPU, or in Triton's interpreter."""

import importlib.util
import os
import runpy
from pathlib import Path

import pytest

if importlib.util.find_spec("chunk_planner") is None:  # a bare GPU machine: nothing is installed
    runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "_checkout.py"))

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
