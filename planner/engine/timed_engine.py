"""An engine in a child process whose steps are timed there.

The parent imports no vLLM, keeps what was measured whatever happens to the child, and owns Ctrl-C.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from chunk_planner.engine.step_timer import EngineInfo, InProcessEngine, Run, Workload
from chunk_planner.errors import PlannerError

#: Set in every timed engine's process.
_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}


class TimedEngine:
    """An engine in a child process that runs workloads and times their steps.

    Args:
        engine_args: keyword arguments of vLLM's `EngineArgs`, or flags for vLLM's own parser.
        log: file that takes what the engine prints.
        env: environment variables of the engine's process.
        patch: called in the child before the engine is built (importable, for spawning).

    Raises:
        PlannerError: the engine did not start, or ended during a run; names the log.
    """

    def __init__(
        self, engine_args: dict | list[str], log: str | Path, env: dict | None = None, patch=None
    ):
        self.log = Path(log)
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(
            target=_child, args=(child, engine_args, str(self.log), (env or {}) | _ENV, patch)
        )
        start = time.perf_counter()
        # What is read before the child's first line runs (OpenMP's settings) must be inherited.
        with _environment((env or {}) | _ENV):
            self._process.start()
        child.close()
        self.info: EngineInfo = self._receive()
        self.start_s = time.perf_counter() - start

    def run(self, workload: Workload) -> Run:
        """Run `workload`, timing each step."""
        with contextlib.suppress(OSError):  # of an engine that is gone, `_receive` tells
            self._pipe.send(workload)
        return self._receive()

    def close(self) -> None:
        """End the engine's process, within half a minute; Ctrl-C does not cut it short."""
        with uninterrupted():
            if self._process.is_alive():
                try:
                    self._pipe.send(None)
                    self._process.join(10)
                except OSError:
                    pass
            if self._process.is_alive():
                self._process.terminate()
                self._process.join(10)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()

    def __enter__(self) -> "TimedEngine":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def _receive(self):
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            answer = RuntimeError(f"exit code {self._process.exitcode}")
        except BaseException:
            self.close()
            raise
        if isinstance(answer, Exception):
            self.close()
            raise PlannerError(f"the engine ended ({answer}); its log is {self.log}")
        return answer


@contextlib.contextmanager
def uninterrupted():
    """Ctrl-C does nothing meanwhile: what was measured is about to be kept.

    Signals are the main thread's; in another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _environment(values: dict):
    """`os.environ` with `values`, for as long as it takes to spawn a child."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _child(pipe, engine_args: dict | list[str], log: str, env: dict, patch) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.update(env)
    try:
        if patch is not None:
            patch()
        engine = InProcessEngine(engine_args)
        pipe.send(engine.info())
        while (workload := pipe.recv()) is not None:
            pipe.send(engine.run(workload))
    except EOFError:
        pass
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        pipe.send(RuntimeError(f"{type(error).__name__}: {str(error).strip()[:300]}"))
