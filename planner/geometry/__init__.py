"""Block size, state bytes and KV cache of a hybrid model, from its config.json alone.

No GPU, no vLLM and no torch: `resolve()` is the arithmetic of vLLM's start-up, `kv_left()` that
of its memory profile, `default_budget()` the budget it picks where the user names none.
"""

from chunk_planner.geometry.budgets import DefaultBudget, default_budget
from chunk_planner.geometry.memory import KVLeft, MemorySettings, kv_left, one_block_requests
from chunk_planner.geometry.resolve import Geometry, resolve
from chunk_planner.geometry.settings import EngineSettings

__all__ = [
    "DefaultBudget",
    "EngineSettings",
    "Geometry",
    "KVLeft",
    "MemorySettings",
    "default_budget",
    "kv_left",
    "one_block_requests",
    "resolve",
]
