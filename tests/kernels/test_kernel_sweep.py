"""The GPU part of the sweep as far as a CPU can go: every launch and check it makes, no time.

Kernels run in the interpreter and the clock is a stand-in that calls everything once.
"""

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from chunk_planner.kernels import timing  # noqa: E402

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MACHINE = {
    "device_name": "No such GPU",
    "torch": "2",
    "triton": "3",
    "cuda": None,
    "hip": "7",
    "date": "2026-01-02T03:04:05+00:00",
}
ATTENTION = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "dtype": "bfloat16",
}
CONFIGS = {
    "gdn": ATTENTION
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "full_attention_interval": 4,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
    },
    "ssd": ATTENTION
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba", "mamba", "mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_expand": 2,
        "mamba_d_state": 32,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 64,
    },
}


@pytest.fixture
def sweep(monkeypatch, device, bfloat16, tmp_path):
    """`kernel_sweep.run` on this machine, with a clock that only calls."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import kernel_cases
    import kernel_sweep
    import plan_cases

    def call_all(competitors):
        for calls in competitors.values():
            for call in calls:
                call()
        return {name: timing.Timing.of([2.0, 1.0, 3.0]) for name in competitors}

    def call(work):
        work()
        return timing.Timing.of([2.0, 1.0, 3.0])

    here = torch.device(device)
    monkeypatch.setattr(timing, "require_device", lambda: here)
    monkeypatch.setattr(timing, "buffer_sets", lambda _: 2)
    monkeypatch.setattr(timing, "fits", lambda _: True)
    monkeypatch.setattr(timing, "time_calls", call_all)
    monkeypatch.setattr(timing, "time_host", call)
    monkeypatch.setattr(timing, "copy_gb_per_s", lambda: 1.0)
    monkeypatch.setattr(kernel_cases, "COPY_REQUESTS", (1, 4))
    monkeypatch.setattr(plan_cases, "SEQUENCES", (5,))
    monkeypatch.setattr(kernel_sweep, "machine", lambda _: dict(MACHINE))

    def run(rule, *options):
        folder = tmp_path / rule
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIGS[rule]))
        out = tmp_path / "out"
        options = ["--model", str(folder), "--max-num-batched-tokens", "200", *options]
        rc = kernel_sweep.main([*options, "--out", str(out)])
        files = list(out.glob("*.json"))
        assert len(files) == 1
        assert not list(out.glob("*.part"))
        return rc, json.loads(files[0].read_text())

    return run


@pytest.mark.parametrize("rule", CONFIGS)
def test_checks_then_times_everything(sweep, rule):
    rc, raw = sweep(rule)
    assert rc == 0
    assert raw["stopped"] is None
    assert raw["kind"] == "kernel-sweep"
    assert raw["machine"]["copy_gb_per_s"] == 1.0
    assert f"{rule} TP1" in raw["shapes"]
    kernels = {row["kernel"] for row in raw["rows"]}
    assert kernels >= {"copy_states", f"scan_states ({rule})", "plan_step", "chunk_metadata"}
    block = raw["shapes"][f"{rule} TP1"]["block_size_tokens"]
    scans = [row for row in raw["rows"] if row["kernel"].startswith("scan_states")]
    assert [row["chunk_tokens"] for row in scans] == list(range(block, 201, block))
    assert [row["checkpoints"] for row in scans] == list(range(1, 200 // block + 1))
    requests = [row for row in raw["rows"] if row["kernel"] == "copy_states"]
    assert [row["requests"] for row in requests] == [1, 4]
    assert requests[1]["price_per_checkpoint_us"] == 0.5
    checkpoint = raw["shapes"][f"{rule} TP1"]["checkpoint_bytes"]
    assert requests[1]["moved_bytes"] == 2 * 4 * checkpoint


def test_its_file_becomes_a_tuning_table(sweep):
    pytest.importorskip("jsonschema")
    _, raw = sweep("gdn", "--time-limit", "0")
    import kernel_table

    (row,) = kernel_table.table_of(raw).data["checkpoint"]
    (shape,) = raw["shapes"].values()
    assert row == {
        "state_bytes": shape["checkpoint_bytes"],
        "p20_us": 1.0,
        "p50_us": 2.0,
        "p80_us": 3.0,
        "repeats": 3,
    }


def test_a_wrong_result_is_never_timed(sweep, monkeypatch, capsys):
    import kernel_cases

    monkeypatch.setattr(kernel_cases, "copy_states", lambda *_: None)
    rc, raw = sweep("gdn")
    assert rc == 1
    assert raw["rows"] == []
    assert "wrong result" in raw["stopped"]
    assert "bytes differ" in capsys.readouterr().err


def test_an_error_in_what_the_delta_rule_erases_is_seen(sweep, monkeypatch):
    import kernel_cases

    def erases_less(*, erase, **operands):
        weights, keys = erase
        kernel_cases.scan_states_reference(**operands, erase=(0.8 * weights, keys))

    monkeypatch.setattr(kernel_cases, "scan_states", erases_less)
    rc, raw = sweep("gdn")
    assert rc == 1
    assert "scan_states (gdn): out: error ratio" in raw["stopped"]


def test_the_time_limit_keeps_what_was_measured(sweep):
    rc, raw = sweep("gdn", "--time-limit", "0")
    assert rc == 0
    assert len(raw["rows"]) == 1
    assert "--time-limit 0" in raw["stopped"]


def test_ctrl_c_keeps_what_was_measured(sweep, monkeypatch):
    import kernel_cases

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(kernel_cases, "_scan_row", interrupted)
    rc, raw = sweep("gdn")
    assert rc == 0
    assert {row["kernel"] for row in raw["rows"]} == {"copy_states"}
    assert raw["stopped"] == "Ctrl-C"


def test_a_launch_that_the_device_refuses_is_one_sentence(sweep, monkeypatch, capsys):
    """Triton's errors are no RuntimeError: a kernel that wants more shared memory than there is."""
    errors = pytest.importorskip("triton.runtime.errors")
    import kernel_cases

    def refused(*_):
        raise errors.OutOfResources(73728, 65536, "shared memory")

    monkeypatch.setattr(kernel_cases, "_scan_row", refused)
    rc, raw = sweep("gdn")
    assert rc == 1
    assert {row["kernel"] for row in raw["rows"]} == {"copy_states"}
    assert raw["stopped"].startswith("OutOfResources: out of resource: shared memory")
    assert raw["stopped"] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens is 0, not 1 token or more"),
        (["-tp", "4"], "--tensor-parallel-size: says something about a model only"),
        (["--kv-cache-dtype", "fp8", "--engine-args", "{}"], "--kv-cache-dtype, --engine-args:"),
        (["--engine-args", "[1]"], "'[1]' is not a JSON object"),
        (["--engine-args", "{"], "'{' is not valid JSON"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_measured(
    sweep, tmp_path, capsys, options, complaint
):
    import kernel_sweep

    try:
        rc = kernel_sweep.main([*options, "--out", str(tmp_path / "none")])
    except SystemExit as exit_:  # argparse
        rc = exit_.code
    assert rc == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("ends", ["an error", "Ctrl-C"])
def test_whole_steps_find_the_device_free(sweep, tmp_path, monkeypatch, capsys, ends):
    pytest.importorskip("vllm")
    import kernel_sweep

    from chunk_planner.engine import calibrate
    from chunk_planner.errors import PlannerError

    happened = []

    def engine(*_, **__):
        happened.append("engine")
        raise PlannerError("an error") if ends == "an error" else KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("freed"))
    monkeypatch.setattr(calibrate, "calibrate", engine)
    (tmp_path / "model.safetensors").touch()
    parser = kernel_sweep.argparse.ArgumentParser()
    kernel_sweep.add_arguments(parser)
    args = parser.parse_args(["--model", str(tmp_path), "--out", str(tmp_path)])
    assert kernel_sweep.whole_steps(args, deadline=0) == 1
    assert happened == ["freed", "engine"]
    assert f"{tmp_path}: {ends}" in capsys.readouterr().err


@pytest.fixture
def gdn_shape(monkeypatch, tmp_path):
    """Keys half as wide as values, so that a transposed state shows."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from kernel_shapes import Shape

    from chunk_planner.geometry import EngineSettings

    config = CONFIGS["gdn"] | {"linear_key_head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return Shape.of(str(tmp_path), EngineSettings())


@pytest.mark.parametrize("rule", ["gdn", "kda", "ssd"])
def test_prefill_calls_fit_the_installed_vllm(rule, gdn_shape, device):
    pytest.importorskip("vllm")
    import kernel_prefill
    from kernel_shapes import Shape

    from chunk_planner.geometry import EngineSettings

    names = {"kda": "GLM-5.3-Flash", "ssd": "NVIDIA-Nemotron-3-Super-120B-A12B-FP8"}
    tp8 = EngineSettings(tensor_parallel_size=8)
    shape = gdn_shape if rule == "gdn" else Shape.of(names[rule], tp8)
    make = kernel_prefill._mamba2 if rule == "ssd" else kernel_prefill._delta_rule
    for library, served, module, function in kernel_prefill.KERNELS:
        if (library, served) == ("vllm", rule):
            kernel = inspect.unwrap(getattr(importlib.import_module(module), function))
            call = make(kernel, shape, 128, torch.device(device))
            taken = inspect.signature(kernel).bind(*call.args, **call.keywords).arguments
            assert "kwargs" not in taken


@pytest.mark.parametrize(("module", "state"), [("fla.ops", (32, 64)), ("vllm.ops", (64, 32))])
def test_initial_states_are_laid_out_as_each_library_wants_them(module, state, gdn_shape):
    """vLLM documents [N, H, V, K], fla-core 0.6 [N, HV, K, V]."""
    import kernel_prefill

    def kernel():
        pass

    kernel.__module__ = module
    call = kernel_prefill._delta_rule(kernel, gdn_shape, 64, torch.device("cpu"))
    assert call.keywords["initial_state"].shape == (1, 2, *state)


def test_a_library_that_does_not_load_costs_its_own_rows_only(gdn_shape, monkeypatch, tmp_path):
    import kernel_prefill

    (tmp_path / "broken.py").write_text("raise RuntimeError('operator nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    kernels = [("broken", "gdn", "broken", "f"), ("absent", "gdn", "no_such_module", "f")]
    monkeypatch.setattr(kernel_prefill, "KERNELS", kernels)
    (row,) = kernel_prefill.time_prefill(gdn_shape, 200, torch.device("cpu"))
    assert row["error"] == "RuntimeError: operator nms does not exist"


def test_a_spawned_engine_finds_a_checkout_that_nobody_installed():
    """What `multiprocessing` does first in the child; -S hides what is installed."""
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(BENCHMARKS)!r}); "
        f"runpy.run_path({str(BENCHMARKS / 'chunk_sweep.py')!r}, run_name='__mp_main__'); "
        "import chunk_planner.errors"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_sentence_and_exit_code_2():
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "kernel_sweep.py")],
        env=clean,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "PyTorch sees no GPU" in done.stderr
