"""Every kernel variant as the compiler leaves it, for three generations of NVIDIA GPUs."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, str(ROOT / "benchmarks" / "_checkout.py")]
COMMAND += ["chunk_planner.kernels.compile_report"]
ARCHS = ("sm_80", "sm_90", "sm_100")
KEYS = {
    "kernel",
    "arch",
    "registers",
    "spills",
    "local_bytes",
    "shared_bytes",
    "widest_access_bytes",
}


def compile_report(*arguments, **environment):
    """Runs the report on its own: kernels imported under TRITON_INTERPRET cannot be compiled."""
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [*COMMAND, *arguments], env=clean | environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def report():
    """The rows of all three architectures, one process each: this is a minute of compiling."""
    with ThreadPoolExecutor() as pool:
        reports = list(pool.map(lambda arch: compile_report("--json", "--arch", arch), ARCHS))
    for done in reports:
        assert done.returncode == 0, done.stderr
    return [row for done in reports for row in json.loads(done.stdout)["variants"]]


def test_every_variant_is_built_for_every_architecture(report):
    built = {(row["kernel"], row["arch"]) for row in report}
    kernels = {kernel for kernel, _ in built}
    assert built == {(k, arch) for k in kernels for arch in ARCHS}
    assert len(built) == len(report)
    for prefix in ("copy_states", "scan_ssd", "scan_gdn", "scan_kda"):
        assert any(kernel.startswith(prefix) for kernel in kernels)


def test_bars(report):
    """No spills, no local memory, 128-bit accesses in copy and scan; nothing left unread."""
    for row in report:
        assert set(row) == KEYS
        assert all(value is not None for value in row.values()), row
        assert row["registers"] > 0, row
        assert row["spills"] == 0, row
        assert row["local_bytes"] == 0, row
        if row["kernel"].startswith(("copy_states", "scan_")):
            assert row["widest_access_bytes"] == 16, row


def test_the_copy_needs_no_shared_memory(report):
    """Loads and stores in one layout: a thread stores the bytes it loaded (see the kernel)."""
    for row in report:
        if row["kernel"].startswith("copy_states"):
            assert row["shared_bytes"] == 0, row


def test_builds_for_amd():
    backends = pytest.importorskip("triton.backends").backends
    if "amd" not in backends:
        pytest.skip("this Triton has no AMD back end")
    wanted = ("copy_states", "scan_ssd_fp32", "scan_gdn_fp32", "scan_kda_fp32")
    done = compile_report("--json", "--arch", "gfx942", "--kernel", *wanted)
    assert done.returncode == 0, done.stderr  # among others, it fits 64 KiB of shared memory
    for row in json.loads(done.stdout)["variants"]:
        assert row["arch"] == "gfx942"
        assert row["registers"] > 0
        assert (row["spills"], row["local_bytes"], row["widest_access_bytes"]) == (0, 0, 16)


def test_refuses_the_interpreter():
    done = compile_report(TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr.splitlines()[-1]


def test_names_what_there_is():
    done = compile_report("--kernel", "nothing")
    assert done.returncode == 2
    assert "copy_states" in done.stderr
    assert compile_report("--arch", "h100").returncode == 2


SPILLING = '''
import triton
import triton.language as tl
from chunk_planner.kernels import compile_report
from chunk_planner.kernels.variants import Variant

@triton.jit
def spilling_kernel(x_ptr, SIZE: tl.constexpr):
    """65536 floats in 128 threads: twice the registers there are."""
    offsets = tl.arange(0, SIZE)
    x = tl.load(x_ptr + offsets)
    tl.debug_barrier()
    tl.store(x_ptr + SIZE - 1 - offsets, x)

variant = Variant("spilling", spilling_kernel, {"x_ptr": "*fp32"}, {"SIZE": 65536}, wide=True)
row = compile_report.report(variant, "sm_90")
print(row)
print(compile_report.missed_bars(variant, row))
print(compile_report.missed_bars(variant, {**row, "spills": None, "local_bytes": 0}))
print(compile_report.missed_bars(variant, {**row, "arch": "gfx942", "shared_bytes": 73728}))
'''


def test_a_kernel_that_spills_is_seen(tmp_path):
    """The bars read something: a kernel made to miss them does."""
    (tmp_path / "spilling.py").write_text(SPILLING)
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT / "benchmarks"), clean.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import _checkout, runpy; runpy.run_path({str(tmp_path / 'spilling.py')!r})",
        ],
        env=clean | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    _, missed, unread, shared = done.stdout.splitlines()
    assert "bytes of spills" in missed
    assert "bytes of local memory" in missed
    assert "widest global access 4 bytes" in missed
    assert "spills could not be read" in unread
    assert "73728 bytes of shared memory, and a program has 65536" in shared
    assert "shared memory" not in missed
