"""Chunk Planner: what vLLM's scheduler does with a prefill budget, what it costs, what to set.

Everything listed in `__all__` is importable from here and loaded on first use, so that
`import chunk_planner` costs next to nothing and never loads torch, Triton or vLLM.
"""

import importlib

__version__ = "0.1.0"

_HOME = {
    "ChunkRule": "rule",
    "SUPPORTED_VERSIONS": "rule",
    "ChunkPlan": "plan",
    "plan_prefill": "plan",
    "Request": "schedule",
    "Schedule": "schedule",
    "plan_schedule": "schedule",
    "StepPlan": "batch",
    "plan_step": "batch",
    "Recommendation": "recommendation",
    "Constraints": "recommendation",
    "recommend": "budget",
    "load_table": "tables",
    "PlannerError": "errors",
}

__all__ = [*sorted(_HOME), "__version__"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
