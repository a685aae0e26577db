"""Steps timed on the real engine: what is in them, the table made of them, and who uses it."""

import json
import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from chunk_planner.cli import main
from chunk_planner.engine import calibrate
from chunk_planner.engine.calibrate import chunk_sizes, measure, measure_table, workloads
from chunk_planner.engine.step_timer import EngineInfo, Workload
from chunk_planner.engine.timed_engine import TimedEngine
from chunk_planner.engine.tiny_model import (
    TINY_ENGINE_ENV,
    keep_mamba2_without_checkpoints,
    tiny_engine_args,
    tiny_server_flags,
    write_tiny_model,
)
from chunk_planner.errors import PlannerError
from chunk_planner.fit import fit
from chunk_planner.plan import plan_prefill
from chunk_planner.rule import ChunkRule
from chunk_planner.schedule import Request, plan_schedule
from chunk_planner.tables import load_table

pytestmark = pytest.mark.engine
BLOCK, BUDGET, SEQS = 64, 672, 4


def arguments(model: Path, budget: int = BUDGET, block: int = BLOCK) -> dict:
    sizes = {"max_num_batched_tokens": budget, "max_num_seqs": SEQS, "max_model_len": 3000}
    return {"model": str(model), **sizes, **tiny_engine_args(block)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), block=BLOCK)


@pytest.fixture(scope="module")
def engine(model: Path):
    with TimedEngine(arguments(model), model / "engine.log", TINY_ENGINE_ENV) as started:
        yield started


def release(engine: TimedEngine) -> str:
    return ".".join(engine.info.fingerprint["vllm_version"].split(".")[:2])


@pytest.mark.parametrize("budget", [16, 64, 100, 200, 640])
def test_a_lone_prompt_is_scheduled_as_planned(engine: TimedEngine, budget: int) -> None:
    run = engine.run(Workload(budget, prompts=(1000,)))
    rule = ChunkRule(BLOCK, budget, vllm_version=release(engine))
    assert [step.tokens for step in run.steps] == list(plan_prefill(rule, 1000).chunks)
    assert run.seconds > 0
    assert all(step.us > 0 for step in run.steps)


def test_the_engine_tells_its_rule(engine: TimedEngine) -> None:
    rule = engine.info.rule
    assert (rule.block_size, rule.max_num_batched_tokens) == (BLOCK, BUDGET)
    run = engine.run(Workload(200, prompts=(1000,)))
    planned = plan_prefill(rule.with_budget(200), 1000)
    assert [step.tokens for step in run.steps] == list(planned.chunks)


def test_a_second_run_computes_the_prompt_again(engine: TimedEngine) -> None:
    """Every prompt is new to the prefix cache: a hit would time less than it says."""
    runs = [engine.run(Workload(200, prompts=(1000,))) for _ in range(2)]
    assert runs[0].steps[0].prefill == runs[1].steps[0].prefill == ((192, 0),)


def test_requests_and_decodes_of_a_step_are_told_apart(engine: TimedEngine) -> None:
    run = engine.run(Workload(100, prompts=(150,), decode_contexts=(70, 200)))
    assert run.steps[0].prefill == ((64, 0),)
    assert sorted(run.steps[0].decode_kv) == [70, 200]
    decoding = engine.run(Workload(100, decode_contexts=(70, 200), decode_steps=3))
    assert [len(step.prefill) for step in decoding.steps] == [0, 0, 0]
    assert [sum(step.decode_kv) for step in decoding.steps] == [270, 272, 274]


def test_concurrent_requests_are_scheduled_as_planned(engine: TimedEngine) -> None:
    prompts, outputs = (700, 300, 37, 900, 64), 5
    run = engine.run(Workload(300, prompts=prompts, output_tokens=outputs))
    rule = ChunkRule(BLOCK, 300, vllm_version=release(engine))
    planned = plan_schedule(rule, [Request(0, n, outputs) for n in prompts], max_num_seqs=SEQS)
    assert len(run.steps) == len(planned.steps)
    for step, scheduled in zip(run.steps, planned.steps, strict=True):
        expected = sorted((n, start) for start, n in scheduled.values())
        assert sorted([*step.prefill, *((1, kv) for kv in step.decode_kv)]) == expected


def test_prompts_that_decodes_starve_are_given_up(engine: TimedEngine) -> None:
    """One block less two decodes is no block: the prompt would wait for 2,900 decode steps."""
    run = engine.run(Workload(BLOCK, prompts=(192,), decode_contexts=(32, 32)))
    assert len(run.steps) < 50
    assert not any(step.prefill for step in run.steps)
    after = engine.run(Workload(BLOCK, prompts=(192,)))
    assert [step.tokens for step in after.steps] == [64, 64, 64]


def test_interrupted_it_keeps_what_was_measured(engine: TimedEngine) -> None:
    def stop(seconds: float, measured) -> None:
        if len(measured.warm_up) == 7:
            raise KeyboardInterrupt

    table = measure_table(engine, time_limit_s=60, context_tokens=1000, on_run=stop)
    assert table.data["provenance"]["complete"] is False
    assert table.data["provenance"]["notes"] == ["stopped: interrupted"]
    assert table.cost.max_tokens > BLOCK


def interrupt(*args) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_while_it_fits_loses_nothing(engine: TimedEngine, monkeypatch) -> None:
    monkeypatch.setattr(calibrate, "fit", lambda points: interrupt() or fit(points))
    table = measure_table(engine, time_limit_s=60, context_tokens=1000, on_run=_stop_after(7))
    assert table.cost.max_tokens > BLOCK
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_ctrl_c_while_the_engine_ends_waits_for_it() -> None:
    """`calibrate` ends it with the table in hand."""
    alive = iter([True, True, False])
    ended = []
    engine = object.__new__(TimedEngine)
    engine._pipe = SimpleNamespace(send=interrupt)
    engine._process = SimpleNamespace(
        is_alive=lambda: next(alive), join=interrupt, terminate=lambda: ended.append(True)
    )
    engine.close()
    assert ended


def test_an_engine_killed_between_runs_is_told_of_with_its_log() -> None:
    engine = object.__new__(TimedEngine)
    engine.log = Path("engine.log")
    engine._pipe, other = multiprocessing.Pipe()
    other.close()
    engine._process = SimpleNamespace(exitcode=-9, join=lambda s: None, is_alive=lambda: False)
    with pytest.raises(PlannerError, match=r"exit code -9.*engine\.log"):
        engine.run(Workload(64, prompts=(64,)))


@pytest.fixture
def measured_now(engine: TimedEngine, monkeypatch: pytest.MonkeyPatch):
    """`chunk-planner calibrate`, its measuring replaced by a table measured before."""
    table = measure_table(engine, time_limit_s=60, context_tokens=1000, on_run=_stop_after(7))
    monkeypatch.setattr(calibrate, "calibrate", lambda *args, **kwargs: table)
    return table


@pytest.mark.parametrize("there", ["damaged", "another engine's", "a folder", "its own"])
def test_a_path_that_does_not_take_the_table_loses_nothing(
    there: str, measured_now, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "t.json"
    if there == "a folder":
        path.mkdir()
    else:
        data = json.loads(json.dumps(measured_now.data))
        data["fingerprint"]["tensor_parallel_size"] = 1 if there == "its own" else 2
        path.write_text(json.dumps(data)[: 99 if there == "damaged" else None])
    code = main(["calibrate", "model", "--merge", "--output", str(path)])
    error = capsys.readouterr().err
    if there == "its own":
        assert code == 130  # as the measurement was interrupted
        assert "stopped: interrupted, before every workload was measured" in error
        assert load_table(path).points[0].repeats == 2 * measured_now.points[0].repeats
        return
    assert code == 2
    assert str(path) in error or "not of the same engine" in error
    kept = error.split("what was measured now is in ")[1].strip()
    assert load_table(kept).data == measured_now.data


def test_the_time_limit_ends_it(engine: TimedEngine) -> None:
    now = iter(range(10_000))
    plan = [Workload(64, prompts=(64,)), Workload(128, prompts=(128,))]
    *_, last = measure(engine, plan, time_limit_s=5, clock=lambda: next(now))
    assert last.stopped == "time limit"
    assert len(last.warm_up) + len(last.runs) == 5


def test_the_command_writes_a_table_that_is_used(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """calibrate -> check -> recommend -> an engine that warns in slowdown."""
    for name, value in TINY_ENGINE_ENV.items():
        monkeypatch.setenv(name, value)
    flags = ["--max-num-batched-tokens", str(BUDGET), "--max-num-seqs", str(SEQS)]
    flags += ["--max-model-len", "3000", *tiny_server_flags(BLOCK)]
    own = ["--time-limit", "20", "--context-tokens", "2800", "--output", str(tmp_path)]
    assert main(["calibrate", str(model), *flags, *own]) == 0
    (path,) = tmp_path.glob("*.json")
    assert f"wrote {path}" in capsys.readouterr().err
    table = load_table(path)
    assert table.cost.max_tokens >= 640
    assert table.cost.max_context_tokens >= 2800
    assert table.fingerprint["block_size"] == BLOCK
    assert main(["tables", "check", str(path)]) == 0
    capsys.readouterr()
    size = ["--block-size", str(BLOCK), "--max-num-batched-tokens", "120", "--max-num-seqs", "4"]
    assert (
        main(["recommend", *size, "--prompt-tokens", "2000", "--table", str(path), "--json"]) == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert answer["evidence"] == "measured-engine"
    assert answer["recommended"]["max_num_batched_tokens"] > 120
    # by the model's name alone, as after a calibrate that wrote into the user's folder
    monkeypatch.setenv("CHUNK_PLANNER_TABLES", str(tmp_path))
    of_model = ["--device-name", "cpu", "--max-model-len", "3000", *size]
    assert main(["recommend", str(model), *of_model, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["evidence"], answer["block_size"]) == ("measured-engine", BLOCK)
    assert answer["recommended"]["max_num_batched_tokens"] > 120
    log = tmp_path / "engine.log"
    here = {"CHUNK_PLANNER_TABLES": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    with TimedEngine(arguments(model, budget=120), log, TINY_ENGINE_ENV | here):
        pass
    said = log.read_text()
    assert "slower per token" in said
    assert "measured-engine" in said


def test_mamba2_runs_on_the_cpu(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "granite-4")
    log = tmp_path / "engine.log"
    patch = keep_mamba2_without_checkpoints
    with TimedEngine(arguments(model, 900, 384), log, TINY_ENGINE_ENV, patch) as started:
        assert started.info.block_size == 384
        run = started.run(Workload(900, prompts=(2000,)))
    assert [step.tokens for step in run.steps] == [768, 768, 384, 80]


def test_a_flag_vllm_does_not_know_is_one_sentence(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["calibrate", str(model), "--no-such-flag", "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "--no-such-flag" in error
    assert "engine.log" in error
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("flag", ["--pipeline-parallel-size", "--data-parallel-size"])
def test_engines_whose_steps_are_not_their_own_are_refused(
    flag: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["calibrate", str(model), flag, "2", "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{flag.strip('-').replace('-', '_')} is 2, steps are timed with 1" in error


def info(**changes) -> EngineInfo:
    values = {
        "device_type": "cuda",
        "block_size": 1152,
        "aligned": True,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
        "max_model_len": 65536,
        "kv_cache_tokens": 500_000,
        "fingerprint": {},
    }
    return EngineInfo(**(values | changes))


@pytest.mark.parametrize(
    "engine_info",
    [
        info(),
        info(block_size=64, max_num_batched_tokens=16384),
        info(block_size=8320, max_num_batched_tokens=2048),
        info(max_num_seqs=1),
        info(max_model_len=2048),
        info(block_size=8320, max_model_len=4096),
        info(kv_cache_tokens=4000),
    ],
    ids=["seed", "small", "saw-tooth", "one-seq", "short", "below-block", "tight-pool"],
)
def test_every_workload_fits_its_engine(engine_info: EngineInfo) -> None:
    for workload in workloads(engine_info):
        requests = [*workload.prompts, *workload.decode_contexts]
        assert 0 < workload.budget <= engine_info.max_num_batched_tokens
        assert requests
        assert len(requests) <= engine_info.max_num_seqs
        assert all(0 < n < engine_info.max_model_len for n in requests)
        assert workload.prompts or workload.decode_steps


def test_decodes_with_drafts_leave_the_prompt_its_chunk() -> None:
    for workload in workloads(info(num_speculative_tokens=3)):
        if workload.prompts and workload.decode_contexts:
            left = workload.budget - 4 * len(workload.decode_contexts)
            assert left >= 1152 or workload.budget < 1152


def test_a_step_of_the_whole_budget_is_measured(engine: TimedEngine) -> None:
    """Whole blocks and a short prompt beside them; budgets with headroom reach such steps."""
    table = measure_table(engine, time_limit_s=60, context_tokens=1000, on_run=_stop_after(16))
    assert BUDGET % BLOCK
    assert table.cost.max_tokens == BUDGET


def _stop_after(runs: int):
    def stop(seconds: float, measured) -> None:
        if len(measured.warm_up) == runs:
            raise KeyboardInterrupt

    return stop


def test_chunk_sizes_are_blocks_and_parts_of_one() -> None:
    assert chunk_sizes(1152, 8192) == [144, 288, 576, *(n * 1152 for n in range(1, 8))]
    assert chunk_sizes(2096, 2048) == [262, 524, 1048, 2048]
    many = chunk_sizes(64, 16384)
    assert many[-1] == 16384
    assert len(many) <= 11
