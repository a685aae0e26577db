"""vLLM's own Scheduler, without a model, an executor or a device.

Everything that decides a schedule is the engine's: `Scheduler`, `KVCacheManager`, the methods of
`VllmConfig` and `SpeculativeConfig`. Only what a checkpoint would tell is stated here (the
`ModelConfig` fields the scheduler reads), and configs skip their validation, which wants a device.
It runs on every supported release, installed or merely on `sys.path`.

Tests load it with `pytest.importorskip`-free plain code (pytest's importlib mode shares no
modules between folders):

    real_scheduler = runpy.run_path(...)   # or the `load_support` line in tests/compat

"""
from types import SimpleNamespace

import torch
from vllm.config import CacheConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.config import ObservabilityConfig, ParallelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
