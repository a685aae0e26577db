"""What a live scheduler says about itself: block, budgets, requests, pool, connector.

Everything is read from the engine that runs; nothing is derived from flags.
`cache_config.mamba_block_size` is never read: in a multi-process engine the workers align their
own copy and EngineCore's stays at its first value.
"""

import math
from dataclasses import dataclass

from vllm.v1.kv_cache_interface import MambaSpec


@dataclass(frozen=True, slots=True)
class PoolNeed:
    """Blocks that one request of `max_model_len` needs, against what the pool has."""

    blocks: int
    needs: int
    max_model_len: int


def why_silent(scheduler) -> str | None:
    """Why budget and block grid are no concern of this engine; None where they are."""
    config = scheduler.vllm_config
    if not getattr(scheduler, "need_mamba_block_aligned_split", False):
        return "no recurrent layers in mamba_cache_mode=align"
    if not config.cache_config.enable_prefix_caching:
        return "prefix caching is off"
    if config.model_config.runner_type == "pooling":
        return "pooling model"
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_role == "kv_consumer":
        return "decode node (kv_consumer)"
    if config.parallel_config.data_parallel_rank_local:
        return "another local data-parallel rank speaks"
    if scheduler.max_model_len <= scheduler.max_num_scheduled_tokens:
        return "the longest request fits one step"
    return None


def mamba_specs(scheduler) -> list[MambaSpec]:
    """The recurrent-state groups' specs."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    return [g.kv_cache_spec for g in groups if isinstance(g.kv_cache_spec, MambaSpec)]


def mamba_block(scheduler) -> int:
    """Tokens between two cached states."""
    return min(spec.block_size for spec in mamba_specs(scheduler))


def checkpoint_bytes(scheduler) -> int:
    """Bytes of one request's recurrent state over all layers, on one rank, without padding."""
    total = 0
    for group in scheduler.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, MambaSpec):
            state = sum(
                math.prod(shape) * dtype.itemsize
                for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
            )
            total += state * len(group.layer_names)
    return total


def one_block_requests(scheduler) -> int:
    """How many requests of one block each the KV pool holds at once."""
    k = scheduler.num_spec_tokens
    blocks = 0
    for group in scheduler.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, MambaSpec):
            # running state, next state, one per speculative token, checkpoints
            blocks += 2 + k + getattr(spec, "num_prefill_checkpoint_blocks", 0)
        else:
            blocks += 1
    # one block of the pool is the null block
    return max(1, (scheduler.kv_cache_config.num_blocks - 1) // blocks)


def pool_need(scheduler) -> PoolNeed:
    """Whether a request of `max_model_len` can run to its end.

    The engine's own start-up check counts whole blocks per group; lookahead tokens and the null
    block come on top, which is why pools of "1.0x" start cleanly and then stand still.
    """
    config = scheduler.vllm_config
    length, lookahead = scheduler.max_model_len, scheduler.num_lookahead_tokens
    needs = 1
    for group in scheduler.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        needs += -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)
        if not isinstance(spec, MambaSpec):
            block = spec.block_size
            needs += -(-(length + lookahead) // block) - -(-length // block)
    return PoolNeed(scheduler.kv_cache_config.num_blocks, needs, length)


def uses_lmcache(scheduler) -> bool:
    transfer = scheduler.vllm_config.kv_transfer_config
    return transfer is not None and "lmcache" in str(transfer.kv_connector or "").lower()


def user_set_scheduled_tokens(scheduler) -> int | None:
    """`--max-num-scheduled-tokens` where it differs from the batched budget, else None.

    With speculative decoding vLLM fills it in itself, with the batched budget.
    """
    config = scheduler.vllm_config.scheduler_config
    scheduled = config.max_num_scheduled_tokens
    return scheduled if scheduled not in (None, config.max_num_batched_tokens) else None
