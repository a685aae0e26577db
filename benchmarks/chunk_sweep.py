#!/usr/bin/env python3
"""Sweep prefill chunk sizes on this machine.

    python benchmarks/chunk_sweep.py                    whole steps of a real vLLM engine
    python benchmarks/chunk_sweep.py --model PATH ...   the same on your model, any vLLM device
    python benchmarks/chunk_sweep.py --device cuda      Triton kernels: the price of a checkpoint

Only the standard library is imported here, so that the kernel half runs on a machine that has
torch and Triton and nothing else.
"""

import argparse
import importlib
import sys
from pathlib import Path

import _checkout  # noqa: F401  a spawned engine runs this file again, and nothing else of ours

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", choices=("engine", "cuda"), default="engine")
    kind, rest = parser.parse_known_args()
    sys.path.insert(0, str(HERE))
    half = importlib.import_module("kernel_sweep" if kind.device == "cuda" else "engine_sweep")
    parser = argparse.ArgumentParser(description=half.__doc__.strip().split("\n")[0])
    parser.add_argument(
        "--device",
        choices=("engine", "cuda"),
        default="engine",
        help="engine: whole vLLM steps on whatever device vLLM has here (default); "
        "cuda: Triton kernels on the GPU",
    )
    half.add_arguments(parser)
    args = parser.parse_args(rest)
    return half.run(args)


if __name__ == "__main__":
    sys.exit(main())
