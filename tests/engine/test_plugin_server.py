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
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chunk_planner.engine.tiny_model import TINY_ENGINE_ENV, tiny_server_flags, write_tiny_model

pytestmark = pytest.mark.engine

BLOCK = 1152
SUGGESTED = 2 * BLOCK + 64 + 512  # two blocks, 64 decodes, room for a short prompt
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
    """A server in its own process; it starts at once and is ready after `ready()`."""

    def __init__(
        self, model: Path, folder: Path, *flags: str, block: int = BLOCK, env: dict | None = None
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.port, self.log = free_port(), folder / "server.log"
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model), "--served-model-name", "tiny", "--port", str(self.port),
            "--host", "127.0.0.1", "--max-model-len", "20480", *tiny_server_flags(block), *flags,
        ]  # fmt: skip
        environment = {**os.environ, **TINY_ENGINE_ENV, **(env or {})}
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment
            )

    def ready(self) -> "Server":
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2):
                    return self
            except OSError:
                time.sleep(0.5)
        pytest.fail(
            f"the server did not get ready in {START_SECONDS} s (exit code "
            f"{self.process.poll()}):\n{self.log.read_text()[-3000:]}"
        )

    def said(self) -> list[str]:
        """The plugin's lines in the log so far."""
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

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Start servers; all are stopped when the test ends."""
    started: list[Server] = []

    def start(*args, **kwargs) -> Server:
        started.append(Server(*args, **kwargs))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def suggested(line: str) -> int:
    return int(re.search(r"--max-num-batched-tokens (\d+)", line)[1])


def test_what_it_says_of_two_blocks_worth_of_budget(model: Path, tmp_path: Path, serve) -> None:
    """The published case, with the default number of sequences and with 1024."""
    flags = ["--max-num-batched-tokens", "2048", "--max-num-seqs"]
    typical = serve(model, tmp_path / "256", *flags, "256")
    many = serve(model, tmp_path / "1024", *flags, "1024")
    typical.ready().complete(list(range(100)))
    many.ready()
    (line,) = typical.said()
    assert "WARNING" in line
    assert "EngineCore" in line
    assert "44 %" in line
    assert "1152 of 2048 tokens" in line
    # 896 tokens beside one block are room enough for 256 decodes, not for 1024
    assert "decoding requests" not in line
    (crowded,) = many.said()
    assert "44 %" in crowded
    assert "more than 896 decoding requests" in crowded
    assert "1024 requests can decode at once" in crowded
    for said in (line, crowded):
        assert "D = 64" in said
        assert suggested(said) == SUGGESTED


def test_the_suggested_budget_and_the_large_default_are_silent(
    model: Path, tmp_path: Path, serve
) -> None:
    flags = ["--max-num-seqs", "256", "--max-num-batched-tokens"]
    servers = [
        serve(model, tmp_path / budget, *flags, budget) for budget in (str(SUGGESTED), "8192")
    ]
    for server in servers:
        server.ready().complete(list(range(100)))
        assert server.said() == []


def test_a_failing_plugin_leaves_one_line_and_a_serving_engine(
    model: Path, tmp_path: Path, serve
) -> None:
    # Python runs sitecustomize in every process it starts, the engine's included.
    (tmp_path / "sitecustomize.py").write_text(
        "import chunk_planner.engine.plugin as plugin\n"
        "def broken(scheduler):\n    raise RuntimeError('made to fail')\n"
        "plugin._observe = broken\n"
    )
    env = {"PYTHONPATH": str(tmp_path)}
    server = serve(model, tmp_path, "--max-num-batched-tokens", "2048", env=env).ready()
    answer = server.complete([3 + i % 500 for i in range(3000)], max_tokens=3)
    assert answer["usage"] == {**answer["usage"], "prompt_tokens": 3000, "completion_tokens": 3}
    (line,) = server.said()
    assert "made to fail" in line
    assert "not affected" in line


def test_with_a_table_of_this_device_it_speaks_in_slowdown(tmp_path: Path, serve) -> None:
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
    used, warned = serve(model, tmp_path, *flags, block=block, env=env).ready().said()
    assert "step costs from" in used
    assert re.search(r"Prefill steps of 128 tokens .*: 1\.\d\dx slower per token", warned)
    assert "measured-engine on this device" in warned
    assert 200 < suggested(warned) <= 1100
