"""The `--device cuda` part of `chunk_sweep.py`: what a state checkpoint costs on this GPU.

For each model shape: the copy of all layers' states in one launch, the chunked state scan with and
without storing the state at block boundaries, and step plan and chunk lists made on the device
against the host path. All results are checked before anything is timed. The raw JSON is rewritten
after every row, so what was measured survives Ctrl-C, the time limit and a failing device.

Needs torch, Triton and NumPy and nothing else, not even an installed checkout:
`kernel_table.py` turns the raw file into a tuning table afterwards, on any machine.
"""

import argparse
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import _checkout

RAW_SCHEMA = 1
DEFAULT_LIMIT_TOKENS = 8192
DEFAULT_TIME_LIMIT_S = 330
WHOLE_STEPS_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part, under vLLM's names where vLLM has them."""
    from chunk_planner.cli.options import json_object

    parser.add_argument(
        "--model",
        nargs="+",
        metavar="MODEL",
        help="config.json, its folder or a well-known name (default: one of each family)",
    )
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--mamba-ssm-cache-dtype", default="auto")
    parser.add_argument("--vllm-version", default="", help="whose block size (default: newest)")
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=DEFAULT_LIMIT_TOKENS,
        help="largest chunk measured, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=DEFAULT_TIME_LIMIT_S,
        metavar="SECONDS",
        help="start no measurement after this (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("sweep-out"), help="folder for the raw JSON and tables"
    )
    parser.add_argument(
        "--engine-args",
        type=json_object,
        metavar="JSON",
        help="where vLLM is installed, time whole steps too, with these engine arguments"
        " (default: for a --model folder with weights, with vLLM's own defaults)",
    )


def run(args: argparse.Namespace) -> int:
    """Checks, times and writes; returns 0, 1 for a wrong result, 2 for no GPU or a bad request."""
    deadline = time.monotonic() + args.time_limit
    try:
        from triton.errors import TritonError

        from chunk_planner.kernels import timing

        device = timing.require_device()
    except ImportError as error:
        return _refuse(f"--device cuda needs torch and Triton: {error}")
    except timing.NoDeviceError as error:
        return _refuse(f"--device cuda: {error}")
    from chunk_planner.errors import PlannerError

    try:
        shapes = _shapes(args)
        report = Report(args.out, {"machine": machine(device), "command": _command()})
    except (PlannerError, OSError) as error:
        return _refuse(str(error))
    try:
        for shape in shapes:
            report.shape(shape)
            for check in _checks(shape, args.max_num_batched_tokens, device):
                check()
        print(f"results checked for {len(shapes)} shapes", flush=True)
        report.raw["machine"]["copy_gb_per_s"] = round(timing.copy_gb_per_s(), 1)
        for shape, row in _rows(shapes, args.max_num_batched_tokens, device):
            report.add(shape.name, row)
            if time.monotonic() > deadline:
                report.stop(f"--time-limit {args.time_limit:.0f} reached")
                break
        else:
            report.stop(None)
    except AssertionError as error:
        report.stop(f"wrong result, so nothing was timed: {error}")
        return 1
    except (RuntimeError, TritonError) as error:  # out of memory, a launch the device refuses
        report.stop(f"{type(error).__name__}: {error}".splitlines()[0])
        return 1
    except KeyboardInterrupt:
        report.stop("Ctrl-C")
    finally:
        report.summary()
    return whole_steps(args, deadline) if report.raw["stopped"] is None else 0


def whole_steps(args: argparse.Namespace, deadline: float) -> int:
    """Where vLLM is installed, its own steps: the table that can choose a budget.

    They get the time left, but no less than a round of them takes.

    Returns 1 if an engine did not start, or Ctrl-C came before it measured anything; the kernels'
    rows are on disk by then.
    """
    models = [m for m in args.model or () if args.engine_args is not None or _has_weights(m)]
    if not models or importlib.util.find_spec("vllm") is None:
        return 0
    import torch

    from chunk_planner.engine.calibrate import calibrate
    from chunk_planner.errors import PlannerError

    torch.cuda.empty_cache()  # the engine, another process, asks for nearly the whole device
    for model in models:
        engine_args = {
            "model": model,
            "tensor_parallel_size": args.tensor_parallel_size,
            "kv_cache_dtype": args.kv_cache_dtype,
            "mamba_ssm_cache_dtype": args.mamba_ssm_cache_dtype,
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "enable_prefix_caching": True,
            **(args.engine_args or {}),
        }
        log = args.out / f"engine-{Path(model).name}.log"
        print(f"{model}: whole steps of vLLM, its output in {log}", flush=True)
        try:
            left = max(WHOLE_STEPS_S, deadline - time.monotonic())
            table = calibrate(engine_args, log, time_limit_s=left, command=_command())
            print(table.write(args.out))
        except (PlannerError, KeyboardInterrupt) as error:
            print(f"chunk_sweep: {model}: {str(error) or 'Ctrl-C'}", file=sys.stderr)
            return 1
    return 0


def _has_weights(model: str) -> bool:
    return any(Path(model).glob("*.safetensors"))


class Report:
    """The raw file: header, shapes, rows; on disk after every row."""

    def __init__(self, folder: Path, header: dict[str, object]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        device = str(header["machine"]["device_name"]).replace(" ", "_")
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        self.path = folder / f"kernels,device_name={device},{stamp}.json"
        self.raw = {
            "kind": "kernel-sweep",
            "schema_version": RAW_SCHEMA,
            **header,
            "stopped": "running",
            "shapes": {},
            "rows": [],
        }
        self._write()

    def shape(self, shape) -> None:
        self.raw["shapes"][shape.name] = shape.describe()

    def add(self, shape: str, row: dict[str, object]) -> None:
        self.raw["rows"].append({"shape": shape, **row})
        self._write()
        print(_line(shape, row), flush=True)

    def stop(self, why: str | None) -> None:
        self.raw["stopped"] = why
        self._write()

    def summary(self) -> None:
        """Where the rows are and, if there could have been more, why there are not."""
        print(f"{len(self.raw['rows'])} rows in {self.path}")
        if self.raw["stopped"]:
            print(f"chunk_sweep: stopped early: {self.raw['stopped']}", file=sys.stderr)

    def _write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.raw, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.path)


def machine(device) -> dict[str, object]:
    """What the numbers belong to."""
    import numpy
    import torch
    import triton

    found = torch.cuda.get_device_properties(device)
    return {
        "device_name": found.name,
        "device_count": torch.cuda.device_count(),
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "l2_bytes": found.L2_cache_size,
        "memory_bytes": found.total_memory,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "commit": _output("git", "-C", str(_checkout.ROOT), "describe", "--always", "--dirty"),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _shapes(args: argparse.Namespace) -> list:
    from kernel_shapes import DEFAULT_SHAPES, Shape

    from chunk_planner.errors import PlannerError
    from chunk_planner.geometry import EngineSettings

    if args.max_num_batched_tokens < 1:
        raise PlannerError(
            f"--max-num-batched-tokens is {args.max_num_batched_tokens}, not 1 token or more"
        )
    wanted = DEFAULT_SHAPES
    if not args.model:
        given = {
            "--tensor-parallel-size": args.tensor_parallel_size != 1,
            "--kv-cache-dtype": args.kv_cache_dtype != "auto",
            "--engine-args": args.engine_args is not None,
        }
        if ignored := ", ".join(flag for flag, is_given in given.items() if is_given):
            raise PlannerError(f"{ignored}: says something about a model only; give --model too")
    else:
        wanted = [(name, args.tensor_parallel_size, args.kv_cache_dtype) for name in args.model]
    return [
        Shape.of(
            model,
            EngineSettings(
                vllm_version=args.vllm_version,
                tensor_parallel_size=tp,
                kv_cache_dtype=kv,
                mamba_ssm_cache_dtype=args.mamba_ssm_cache_dtype,
            ),
        )
        for model, tp, kv in wanted
    ]


def _checks(shape, limit: int, device) -> Iterator[Callable[[], None]]:
    import kernel_cases
    import plan_cases

    yield partial(kernel_cases.check_copy, shape, device)
    yield partial(kernel_cases.check_scan, shape, limit, device)
    yield partial(plan_cases.check_plan, shape, limit, device)


def _rows(shapes: list, limit: int, device) -> Iterator[tuple[object, dict[str, object]]]:
    """The rows, the shapes' cheap and telling ones first, in case time runs out."""
    from kernel_cases import time_copy, time_scan
    from kernel_prefill import time_prefill
    from plan_cases import time_plan

    for shape in shapes:
        yield from ((shape, row) for row in time_copy(shape, device))
    for time_rows in (time_scan, time_plan, time_prefill):
        for shape in shapes:
            yield from ((shape, row) for row in time_rows(shape, limit, device))


def _line(shape: str, row: dict[str, object]) -> str:
    """One row for the eye: what, then every time and rate in it."""
    parts = []
    for key, value in row.items():
        if isinstance(value, dict):
            rate = f" ({value['percent_of_copy']} % of copy)" if "percent_of_copy" in value else ""
            parts.append(f"{key} {value['p50_us']} us{rate}")
        elif key not in ("p20_us", "p80_us", "repeats", "calls_per_repeat", "moved_bytes"):
            parts.append(f"{key} {value}" if key != "kernel" else str(value))
    return f"{shape}: {', '.join(parts)}"


def _command() -> str:
    return shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def _refuse(why: str) -> int:
    print(f"chunk_sweep: {why}", file=sys.stderr)
    return 2


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
