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


@pytest.fixture
def bfloat16(monkeypatch) -> None:
    """The interpreter takes bfloat16 products, and rounds to bfloat16, as a GPU does.

    It holds such numbers as 16-bit integers: unpatched, it multiplies those integers, and cuts
    float32 off instead of rounding it.
    """
    if not INTERPRETED:
        return
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    create_dot, cast_impl = builder.create_dot, builder.cast_impl

    def widened(side):
        if side.dtype.scalar != tl.bfloat16:
            return side
        values = torch.from_numpy(np.ascontiguousarray(side.data)).view(torch.bfloat16)
        return handle(values.float().numpy(), tl.float32)

    def dot(self, a, b, *rest):
        return create_dot(self, widened(a), widened(b), *rest)

    def cast(self, src, to):
        if (src.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast_impl(self, src, to)
        values = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16()
        return handle(values.view(torch.uint16).numpy(), tl.bfloat16)

    monkeypatch.setattr(builder, "create_dot", dot)
    monkeypatch.setattr(builder, "cast_impl", cast)
