"""vLLM's own Scheduler, without a model, an executor or a device.

Everything that decides a schedule is the engine's: `Scheduler`, `KVCacheManager`, the methods of
`VllmConfig` and `SpeculativeConfig`. Only what a checkpoint would tell is stated here, and the
configs skip their validation, which wants a device. Runs on every supported release, installed or
merely first on `sys.path`.

Tests and benchmarks `import real_scheduler`: pytest puts this folder on the path
(`pythonpath` in pyproject.toml), a script does so itself.
"""

import dataclasses
from collections.abc import Iterable
from types import SimpleNamespace

import torch
from vllm.config import (
    CacheConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from chunk_planner.engine.live_rule import chunk_rule as chunk_rule

#: Longer than any sequence here, so that the model's length never cuts a step.
MAX_MODEL_LEN = 1 << 22

#: Ways to draft, as fields of SpeculativeConfig.
DRAFTERS = {
    "none": None,
    "mtp": {"method": "mtp"},
    "eagle": {"method": "eagle"},
    "eagle_keep_block": {"method": "eagle", "disable_eagle_block_drop": True},
    # from 0.33 on, what drops a block; before, hashes never look ahead
    "eagle_plain_hashes": {"method": "eagle", "disable_lookahead_block_hashes": True},
    "dflash": {"method": "dflash", "parallel_drafting": True},
    "draft_model": {"method": "draft_model"},
    "pard": {"method": "draft_model", "parallel_drafting": True},
    # num_nextn_predict_layers > 1 in the draft's config makes MTP multi-module
    "mtp_multi": {"method": "mtp", "modules": 3},
    "mtp_multi_keep_block": {"method": "mtp", "modules": 3, "disable_eagle_block_drop": True},
}


class _Stated(SimpleNamespace):
    """Only what is stated; any other property of the model is None, absent."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _bare(cls: type, **values: object) -> object:
    """A config of its fields' defaults and `values`, its validation left out."""
    config = object.__new__(cls)
    for item in dataclasses.fields(cls):
        # pydantic keeps its own Field object where a plain dataclass has the default
        field = item.default if hasattr(item.default, "default_factory") else item
        value, factory = field.default, field.default_factory
        if callable(factory):
            value = _bare(factory) if dataclasses.is_dataclass(factory) else factory()
        elif type(value).__name__ in ("PydanticUndefinedType", "_MISSING_TYPE"):
            value = None
        object.__setattr__(config, item.name, values.get(item.name, value))
    for name, value in values.items():
        object.__setattr__(config, name, value)
    return config


def _draft_config(drafter: str, num_speculative_tokens: int) -> object | None:
    options = DRAFTERS[drafter]
    if options is None:
        return None
    options = dict(options)
    modules = options.pop("modules", 1)
    hf_config = _Stated(model_type="mtp", num_nextn_predict_layers=modules, n_predict=modules)
    model = _Stated(hf_config=hf_config, hf_text_config=hf_config)
    return _bare(
        SpeculativeConfig,
        num_speculative_tokens=num_speculative_tokens,
        draft_model_config=model,
        target_model_config=model,
        **options,
    )


def build_scheduler(
    *,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_scheduled_tokens: int | None = None,
    max_num_seqs: int = 16,
    max_num_active_seqs: int | None = None,
    long_prefill_token_threshold: int = 0,
    long_prefill_token_threshold_adaptive: bool = False,
    drafter: str = "none",
    num_speculative_tokens: int = 0,
    scheduler_block_size: int | None = None,
    hash_block_size: int | None = None,
    checkpoint_alignment: int | None = None,
    partial_hits: bool = False,
    shared_prefix_checkpoint: bool = False,
    num_blocks: int = 20_000,
    scheduler_cls: type = Scheduler,
) -> Scheduler:
    """A scheduler of one attention and one Mamba group in align mode.

    Args:
        drafter: a key of `DRAFTERS`.
        scheduler_block_size, hash_block_size, partial_hits, shared_prefix_checkpoint: set on the
            built scheduler; in an engine they follow from the groups' block sizes.
        num_blocks: the KV pool; the default is more than the tests' requests need.
    """
    scheduler_options = {
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_scheduled_tokens": max_num_scheduled_tokens,
        "max_num_seqs": max_num_seqs,
        "long_prefill_token_threshold": long_prefill_token_threshold,
        "long_prefill_token_threshold_adaptive": long_prefill_token_threshold_adaptive,
        "max_num_active_seqs": max_num_active_seqs,
        "max_model_len": MAX_MODEL_LEN,
        "async_scheduling": False,
    }
    config = _bare(
        VllmConfig,
        scheduler_config=_bare(SchedulerConfig, **scheduler_options),
        cache_config=_bare(
            CacheConfig,
            block_size=block_size,
            num_gpu_blocks=num_blocks,
            enable_prefix_caching=True,
            mamba_cache_mode="align",
        ),
        speculative_config=_draft_config(drafter, num_speculative_tokens),
        model_config=_Stated(
            max_model_len=MAX_MODEL_LEN,
            runner_type="generate",
            uses_mrope=False,
            is_encoder_decoder=False,
            is_diffusion=False,
            supports_multimodal_inputs=False,
            enable_return_routed_experts=False,
            return_sampling_mask=False,
        ),
    )
    attention = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=16, dtype=torch.bfloat16
    )
    mamba = MambaSpec(
        block_size=block_size,
        shapes=((1,),),
        dtypes=(torch.bfloat16,),
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode="align",
        num_speculative_blocks=num_speculative_tokens,
        num_prefill_checkpoint_blocks=0 if checkpoint_alignment is None else 1,
        prefill_checkpoint_alignment=checkpoint_alignment,
    )
    scheduler = scheduler_cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec(["attention"], attention),
                KVCacheGroupSpec(["mamba"], mamba),
            ],
        ),
        structured_output_manager=SimpleNamespace(
            should_advance=lambda request: False,
            accept_tokens=lambda request, tokens: True,
            validate_tokens=lambda request, tokens: tokens,
        ),
        block_size=block_size,
    )
    # Prefix caching is on, and so is all that follows from it; only the block store stays empty,
    # because `run_schedule` states the prefix hits.
    manager = scheduler.kv_cache_manager
    for store in (manager, *manager.coordinator.single_type_managers):
        store.enable_caching = False
    scheduler.block_size = scheduler_block_size or block_size
    scheduler.hash_block_size = hash_block_size or scheduler.block_size
    scheduler.mamba_partial_cache_hit = partial_hits
    # 0.30 calls the second flag by another name
    scheduler.mamba_shared_prefix_checkpoint = shared_prefix_checkpoint
    scheduler.mamba_fine_grained_prefix_cache = shared_prefix_checkpoint
    return scheduler


def run_schedule(
    scheduler: Scheduler, requests: Iterable, accepted_tokens: int = 0, max_steps: int = 10_000
) -> list[dict[int, tuple[int, int]]]:
    """Step a scheduler through `requests` until all are finished or nothing moves any more.

    Args:
        requests: with the fields of `chunk_planner.schedule.Request`; their prefix hits are what
            the lookup is made to answer.
        accepted_tokens: most drafts a verification step accepts.

    Returns:
        For every step, request index -> (tokens computed before it, tokens scheduled).
    """
    requests = list(requests)
    lookup = scheduler._get_local_prefix_cache_hit

    def stated_hit(engine_request: Request, *args: object) -> tuple:
        blocks, _, _, diverged = lookup(engine_request, *args)
        request = requests[int(engine_request.request_id)]
        return blocks, request.num_computed_tokens, request.shared_prefix_boundary, diverged

    scheduler._get_local_prefix_cache_hit = stated_hit
    arrivals = sorted(range(len(requests)), key=lambda index: requests[index].arrival_step)
    drafts = [0] * scheduler.num_spec_tokens
    steps: list[dict[int, tuple[int, int]]] = []
    while len(steps) < max_steps:
        while arrivals and requests[arrivals[0]].arrival_step <= len(steps):
            index = arrivals.pop(0)
            scheduler.add_request(_engine_request(str(index), requests[index]))
        output = scheduler.schedule()
        scheduled = output.num_scheduled_tokens
        if not scheduled and not arrivals:
            break
        step, sampled = {}, []
        for name, tokens in scheduled.items():
            request = scheduler.requests[name]
            step[int(name)] = (request.num_computed_tokens - tokens, tokens)
            checked = output.scheduled_spec_decode_tokens.get(name, [])
            accepted = min(len(checked), accepted_tokens) if -1 not in checked else 0
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([1] * (1 + accepted) if done else [])
        steps.append(step)
        names = list(scheduled)
        scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        if drafts:
            drafting = [name for name, tokens in zip(names, sampled, strict=True) if tokens]
            scheduler.update_draft_token_ids(DraftTokenIds(drafting, [drafts[:] for _ in drafting]))
    return steps


def _engine_request(name: str, request: object) -> Request:
    sampling = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True)
    return Request(
        request_id=name,
        prompt_token_ids=[0] * request.num_prompt_tokens,
        sampling_params=sampling,
        pooling_params=None,
    )
