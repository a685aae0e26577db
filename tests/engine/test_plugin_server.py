"""The start-up warning in the log of the real OpenAI server, as an operator meets it.

Every case starts `vllm.entrypoints.openai.api_server` as a process of its own, with its engine in
a second one, and reads what they log.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chunk_planner.engine.tiny_model import TINY_ENGINE_ENV, tiny_server_flags, write_tiny_model

pytestmark = pytest.mark.engine

BLOCK = 1152
START_SECONDS = 240
MARK = "Chunk Planner"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_tiny_model(tmp_path_factory.mktemp("model"), block=BLOCK))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A running server and the log it has written so far."""

    def __init__(self, log: Path, port: int) -> None:
        self.log, self.port = log, port

    def lines(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if MARK in line]

    def complete(self, prompt: list[int], max_tokens: int = 2) -> dict:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        body["detokenize"] = False
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)


@contextmanager
def serve(
    model: Path, folder: Path, *flags: str, block: int = BLOCK, env: dict[str, str] | None = None
) -> Iterator[Server]:
    port, log = free_port(), folder / "server.log"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--served-model-name", "tiny", "--port", str(port),
        "--host", "127.0.0.1", "--max-model-len", "20480", *tiny_server_flags(block), *flags,
    ]  # fmt: skip
    environment = {**os.environ, **TINY_ENGINE_ENV, **(env or {})}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_until_ready(process, port, log)
        yield Server(log, port)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(process: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the server ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server was not ready after {START_SECONDS} s:\n{log.read_text()[-3000:]}")


def suggested(line: str) -> int:
    return int(re.search(r"--max-num-batched-tokens (\d+)", line)[1])


def test_warns_once_and_the_suggested_value_does_not_warn(model: Path, tmp_path: Path) -> None:
    flags = ["--max-num-seqs", "256", "--max-num-batched-tokens"]
    with serve(model, tmp_path, *flags, "2048") as server:
        server.complete(list(range(100)))
        (line,) = server.lines()
    assert "WARNING" in line
    assert "EngineCore" in line
    assert "44 %" in line
    assert "1152 of 2048 tokens" in line
    # 896 tokens beside one block are room enough for 256 decodes
    assert "decoding requests" not in line
    assert "D = 64" in line
    value = suggested(line)
    assert value == 2 * BLOCK + 64 + 512

    again = tmp_path / "again"
    again.mkdir()
    with serve(model, again, *flags, str(value)) as server:
        server.complete(list(range(100)))
        assert server.lines() == []


def test_a_budget_that_fits_the_grid_is_silent(model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path, "--max-num-batched-tokens", "8192") as server:
        assert server.lines() == []


def test_more_sequences_than_one_block_leaves_room_for(model: Path, tmp_path: Path) -> None:
    flags = ["--max-num-batched-tokens", "2048", "--max-num-seqs", "1024"]
    with serve(model, tmp_path, *flags) as server:
        (line,) = server.lines()
    assert "44 %" in line
    assert "more than 896 decoding requests" in line
    assert "1024 requests can decode at once" in line
    assert suggested(line) == 2 * BLOCK + 64 + 512


def test_a_failing_plugin_leaves_one_line_and_a_serving_engine(model: Path, tmp_path: Path) -> None:
    # Python runs sitecustomize in every process it starts, the engine's included.
    (tmp_path / "sitecustomize.py").write_text(
        "import chunk_planner.engine.plugin as plugin\n"
        "def broken(scheduler):\n    raise RuntimeError('made to fail')\n"
        "plugin._observe = broken\n"
    )
    env = {"PYTHONPATH": str(tmp_path)}
    with serve(model, tmp_path, "--max-num-batched-tokens", "2048", env=env) as server:
        answer = server.complete([3 + i % 500 for i in range(3000)], max_tokens=3)
        (line,) = server.lines()
    assert answer["usage"] == {**answer["usage"], "prompt_tokens": 3000, "completion_tokens": 3}
    assert "made to fail" in line
    assert "not affected" in line


def test_with_a_table_of_this_device_it_speaks_in_slowdown(tmp_path: Path) -> None:
    block = 128
    model = write_tiny_model(tmp_path / "tiny-qwen3-next", block=block)
    flags = [*tiny_server_flags(block), "--max-model-len", "8192", "--max-num-seqs", "8"]
    calibrate = ["-m", "chunk_planner", "calibrate", str(model), "--time-limit", "25"]
    calibrate += ["--output", str(tmp_path / "tables"), "--max-num-batched-tokens", "1100", *flags]
    subprocess.run(
        [sys.executable, *calibrate], env={**os.environ, **TINY_ENGINE_ENV}, check=True, timeout=400
    )
    env = {"CHUNK_PLANNER_TABLES": str(tmp_path / "tables")}
    flags = ["--max-model-len", "8192", "--max-num-seqs", "8", "--max-num-batched-tokens", "200"]
    with serve(model, tmp_path, *flags, block=block, env=env) as server:
        used, warned = server.lines()
    assert "step costs from" in used
    assert re.search(r"Prefill steps of 128 tokens .*: 1\.\d\dx slower per token", warned)
    assert "measured-engine on this device" in warned
    assert 200 < suggested(warned) <= 1100
