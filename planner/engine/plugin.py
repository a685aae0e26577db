"""vLLM's general plugin: one warning in vLLM's log when a budget is spent badly.

vLLM calls `register` unguarded, in the front end, in every EngineCore and in every worker. So this
module imports the standard library alone, and nothing in it may raise: what fails is logged once
and the engine goes on as if the plugin were not installed.

`Scheduler.__init__` is the hook because there, and nowhere earlier, the block size, the KV cache
groups and the budgets that count are final and in one process.
"""

import functools
import logging
import os

#: Children of vLLM's own logger are formatted and filtered like its own lines.
LOGGER_NAME = "vllm.chunk_planner"

_failed = False


def register() -> None:
    """Entry point of `vllm.general_plugins`. Never raises; installing twice changes nothing."""
    if os.environ.get("CHUNK_PLANNER", "1") == "0":
        return
    guarded(_install)()


def guarded(function):
    """`function` with every exception caught and the first one logged. Returns None on failure."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _log_failure(error)
            return None

    return call


def _log_failure(error: Exception) -> None:
    global _failed
    if _failed:
        return
    _failed = True
    try:
        from chunk_planner.errors import PlannerError

        # A message to the user needs no traceback; anything else is a bug worth one.
        logging.getLogger(LOGGER_NAME).warning(
            "Chunk Planner steps aside, the engine is not affected: %s: %s",
            type(error).__name__,
            error,
            exc_info=logging.getLogger(LOGGER_NAME).isEnabledFor(logging.DEBUG)
            and not isinstance(error, PlannerError),
        )
    except Exception:
        pass


def _install() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    if getattr(Scheduler.__init__, "_chunk_planner", False):
        return
    original = Scheduler.__init__
    observe = guarded(_observe)

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        observe(self)

    __init__._chunk_planner = True
    Scheduler.__init__ = __init__
    if os.environ.get("CHUNK_PLANNER_GPU_METADATA") == "1":
        from chunk_planner.engine.gpu_metadata import install

        install()


def _observe(scheduler) -> None:
    from chunk_planner.engine.startup import at_start

    at_start(scheduler, logging.getLogger(LOGGER_NAME), guarded)
