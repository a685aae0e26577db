"""Whole engine steps, timed: the only step timer of the project.

The engine runs in process, so that its scheduler can be seen and its budget lowered between
prompts, and with async scheduling off, which overlaps steps. `timed_engine` puts it into a child.

One start measures every smaller budget: the buffers, graphs and KV pool stay those of the started
budget, so a chosen budget is confirmed by a restart.
"""

import sys
import time
from dataclasses import dataclass

from chunk_planner.errors import PlannerError
from chunk_planner.rule import ChunkRule

#: Steps after which prompts that are given nothing will not be given anything while the decodes
#: last: a budget of one block, less those decodes, holds no block. On top come as many steps as a
#: prompt decodes, which another may have to wait for.
STARVED_STEPS = 20


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to run under one budget. Sizes are tokens; every prompt is new to the prefix cache.

    decode_contexts: requests that are already decoding, at these context lengths, before the
        timing starts; they decode along until the prompts are done.
    prompts: requests that arrive together when the timing starts.
    output_tokens: what each prompt generates, 1 = prefill only.
    decode_steps: with no prompts, how many steps to time.
    """

    budget: int
    prompts: tuple[int, ...] = ()
    output_tokens: int = 1
    decode_contexts: tuple[int, ...] = ()
    decode_steps: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One timed step: who was in it (as in `chunk_planner.cost.Point`) and its microseconds."""

    prefill: tuple[tuple[int, int], ...]
    decode_kv: tuple[int, ...]
    us: float

    @property
    def tokens(self) -> int:
        return sum(n for n, _ in self.prefill) + len(self.decode_kv)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload; its prompts are not through where the decodes left them no block.

    `peak_bytes` is the device allocator's peak, None without a GPU.
    """

    workload: Workload
    steps: tuple[Step, ...]
    peak_bytes: int | None = None

    @property
    def seconds(self) -> float:
        return sum(step.us for step in self.steps) / 1e6


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the started engine says about itself.

    rule: how it cuts prefills at its full budget; None where it does not cut them on blocks, or its
        release is unknown.
    """

    device_type: str
    block_size: int
    aligned: bool
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    kv_cache_tokens: int
    fingerprint: dict
    num_speculative_tokens: int = 0
    rule: ChunkRule | None = None


class InProcessEngine:
    """vLLM's LLMEngine in this process, with its scheduler in view."""

    def __init__(self, engine_args: dict | list[str]):
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        args = _parse(engine_args) if isinstance(engine_args, list) else EngineArgs(**engine_args)
        args.async_scheduling = False
        _check_one_at_a_time(args)
        self.engine = LLMEngine.from_engine_args(args)
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.config = self.scheduler.vllm_config
        self.full_budget = self.scheduler.max_num_scheduled_tokens
        self.on_cuda = self.config.device_config.device_type == "cuda"
        self._count = 0
        self._scheduled = ((), ())
        schedule = self.scheduler.schedule

        def recording(*args, **kwargs):
            output = schedule(*args, **kwargs)
            self._scheduled = self._contents(output.num_scheduled_tokens)
            return output

        self.scheduler.schedule = recording

    def info(self) -> EngineInfo:
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

        from chunk_planner.engine.fingerprint import fingerprint

        scheduler = self.scheduler
        concurrency = get_max_concurrency_for_kv_cache_config(
            self.config, scheduler.kv_cache_config
        )
        return EngineInfo(
            device_type=self.config.device_config.device_type,
            block_size=scheduler.cache_config.block_size,
            aligned=bool(getattr(scheduler, "need_mamba_block_aligned_split", False)),
            max_num_batched_tokens=scheduler.scheduler_config.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_running_reqs,
            max_model_len=scheduler.max_model_len,
            kv_cache_tokens=int(scheduler.max_model_len * concurrency),
            fingerprint=fingerprint(scheduler),
            num_speculative_tokens=scheduler.num_spec_tokens,
            rule=self._rule(),
        )

    def _rule(self) -> ChunkRule | None:
        from chunk_planner.engine.live_rule import chunk_rule

        if not getattr(self.scheduler, "need_mamba_block_aligned_split", False):
            return None
        try:
            return chunk_rule(self.scheduler)
        except PlannerError:
            return None

    def run(self, workload: Workload) -> Run:
        scheduler = self.scheduler
        scheduler.max_num_scheduled_tokens = self.full_budget
        # room for as many output tokens as a decode can need beside the prompts
        beside = [self._add(n, scheduler.max_model_len - n) for n in workload.decode_contexts]
        waits = _Waits(scheduler)
        while waits.prefilling(beside) and not waits.starved:
            self.engine.step()
        scheduler.max_num_scheduled_tokens = workload.budget
        self._reset_peak()
        prompts = {self._add(n, workload.output_tokens) for n in workload.prompts}
        steps, waits = [], _Waits(scheduler, STARVED_STEPS + workload.output_tokens)
        wanted = workload.decode_steps if not prompts else sys.maxsize
        while len(steps) < wanted and (prompts or not workload.prompts) and not waits.starved:
            steps.append(self._timed_step())
            prompts = {r for r in prompts if r in scheduler.requests}
            waits.prefilling(prompts)
        peak = self._peak()
        self.engine.abort_request([*beside, *prompts], internal=True)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return Run(workload, tuple(steps), peak)

    def _timed_step(self) -> Step:
        self._scheduled = ((), ())
        start = time.perf_counter()
        self.engine.step()
        us = (time.perf_counter() - start) * 1e6
        return Step(*self._scheduled, us)

    def _contents(self, scheduled: dict[str, int]):
        """(prefill, decode_kv) of a step that `schedule()` has just decided on."""
        prefill, decode_kv = [], []
        for request_id, n in scheduled.items():
            request = self.scheduler.requests[request_id]
            before = request.num_computed_tokens - n  # schedule() has advanced it
            if n == 1 and before >= request.num_prompt_tokens:
                decode_kv.append(before)
            else:
                prefill.append((n, before))
        return tuple(prefill), tuple(decode_kv)

    def _reset_peak(self) -> None:
        if self.on_cuda:
            self.core.model_executor.collective_rpc(_reset_peak_bytes)

    def _peak(self) -> int | None:
        if not self.on_cuda:
            return None
        return max(self.core.model_executor.collective_rpc(_peak_bytes))

    def _add(self, tokens: int, output_tokens: int) -> str:
        """Add a request whose prompt shares no block with any before it."""
        import numpy as np
        from vllm import SamplingParams, TokensPrompt

        self._count += 1
        vocabulary = min(self.config.model_config.get_vocab_size(), 1 << 15)
        ids = np.random.default_rng(self._count).integers(3, vocabulary, tokens).tolist()
        return self.engine.add_request(
            f"chunk-planner-{self._count}",
            TokensPrompt(prompt_token_ids=ids),
            SamplingParams(max_tokens=output_tokens, ignore_eos=True, detokenize=False),
        )


class _Waits:
    """Notices prompts that are given nothing, step after step."""

    def __init__(self, scheduler, most: int = STARVED_STEPS):
        self._requests, self._most = scheduler.requests, most
        self._left, self._steps = 0, 0

    @property
    def starved(self) -> bool:
        return self._steps >= self._most

    def prefilling(self, request_ids) -> bool:
        """Whether any of them has no output yet; to be asked once a step."""
        requests = [self._requests[r] for r in request_ids if r in self._requests]
        left = sum(
            r.num_prompt_tokens - r.num_computed_tokens for r in requests if not r.num_output_tokens
        )
        self._steps = self._steps + 1 if left and left == self._left else 0
        self._left = left
        return left > 0


def _parse(flags: list[str]):
    """vLLM's `EngineArgs` from its own flags; a flag vLLM refuses is a ValueError."""
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str):
            raise ValueError(message)

    return EngineArgs.from_cli_args(EngineArgs.add_cli_args(Parser()).parse_args(flags))


def _check_one_at_a_time(args) -> None:
    """Raises ValueError for engines whose steps overlap, or wait for engines that are not there."""
    for name, why in (
        ("pipeline_parallel_size", "the steps of a pipeline overlap"),
        ("data_parallel_size", "the other ranks would not start"),
    ):
        if getattr(args, name) > 1:
            raise ValueError(f"{name} is {getattr(args, name)}, steps are timed with 1: {why}")


def _reset_peak_bytes(worker) -> None:
    """Runs in every worker."""
    import torch

    torch.cuda.reset_peak_memory_stats()


def _peak_bytes(worker) -> int:
    """Runs in every worker: the allocator's peak since `_reset_peak_bytes`."""
    import torch

    return torch.cuda.max_memory_allocated()
