"""The rule of a live scheduler, asked rather than restated.

Forks and later releases change how a prefill is cut (one block per step, other grids), and inside
an engine its own `Scheduler._mamba_block_aligned_split` is the truth. `LiveRule` calls that method
with a stand-in for the request and offers the answers as a `chunk_planner.rule.Rule`, so whatever
takes a `ChunkRule` plans with the engine's own cut. `chunk_rule` reads the settings of ours from a
scheduler instead, for a plan that has to leave the engine's process.
"""

from copy import copy
from dataclasses import replace

import vllm

from chunk_planner.errors import PlannerError
from chunk_planner.rule import RELEASES, ChunkRule, Release, Rule, find_release


class _Request:
    """What a split reads of a request; it belongs to no queue and holds no blocks."""

    __slots__ = ("num_computed_tokens", "num_prompt_tokens", "num_tokens", "shared_prefix_boundary")

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens


class LiveRule(Rule):
    """The chunk rule of `scheduler` as it is now; its block and budgets are read when asked for.

    Nothing in the engine changes. A rule that is not ours says nothing of where it is regular, so
    prompts are planned step by step, and of the states it keeps only those on the block grid are
    known.

    Args:
        scheduler: a vLLM scheduler in `mamba_cache_mode="align"`.

    Raises:
        PlannerError: the scheduler cuts no prefills on blocks, or belongs to a release older than
            those supported.
    """

    __slots__ = ("_scheduler", "release")

    def __init__(self, scheduler) -> None:
        if not getattr(scheduler, "need_mamba_block_aligned_split", False):
            raise PlannerError(
                f"{type(scheduler).__name__} cuts no prefill on blocks: the model has no recurrent "
                "layers, or mamba_cache_mode is not 'align'"
            )
        self._scheduler = scheduler
        self.release = _release(vllm.__version__)

    @property
    def block_size(self) -> int:
        return self._scheduler.cache_config.block_size

    @property
    def max_num_batched_tokens(self) -> int:
        return self._scheduler.scheduler_config.max_num_batched_tokens

    @property
    def scheduled_budget(self) -> int:
        return self._scheduler.max_num_scheduled_tokens

    @property
    def draft_slots(self) -> int:
        drafting = self._scheduler.vllm_config.speculative_config
        return drafting.max_num_new_slots_for_drafting if drafting is not None else 0

    @property
    def long_prefill_token_threshold(self) -> int:
        return self._scheduler.scheduler_config.long_prefill_token_threshold

    @property
    def long_prefill_token_threshold_adaptive(self) -> bool:
        return getattr(self._scheduler, "adaptive_long_prefill_threshold", False)

    @property
    def prefill_lookahead_tokens(self) -> int:
        return self._scheduler.num_prefill_lookahead

    def split(
        self,
        start: int,
        num_new_tokens: int,
        num_prompt_tokens: int,
        num_tokens: int | None = None,
        shared_prefix_boundary: int = 0,
    ) -> int:
        request = _Request()
        request.num_computed_tokens = start
        request.num_prompt_tokens = num_prompt_tokens
        request.num_tokens = num_prompt_tokens if num_tokens is None else num_tokens
        request.shared_prefix_boundary = shared_prefix_boundary
        try:
            return self._scheduler._mamba_block_aligned_split(request, num_new_tokens)
        except AttributeError as error:
            if error.obj is not request:
                raise
            raise PlannerError(
                f"the split of {type(self._scheduler).__name__} reads request.{error.name}, which "
                "a plan does not know; plan with a ChunkRule instead"
            ) from None

    def with_budget(
        self, max_num_batched_tokens: int, max_num_scheduled_tokens: int | None = None
    ) -> "LiveRule":
        """The rule that the same engine would have if it were started with other budgets.

        It asks a copy of the scheduler that differs in the budgets; block and threshold are as of
        now.
        """
        scheduler = self._scheduler
        # Not copy(scheduler): a subclass may give copying a meaning of its own.
        other = object.__new__(type(scheduler))
        other.__dict__.update(scheduler.__dict__)
        other.max_num_scheduled_tokens = max_num_scheduled_tokens or max_num_batched_tokens
        other.scheduler_config = copy(scheduler.scheduler_config)
        # The configs of vLLM validate assignments, some by running their device checks again.
        object.__setattr__(other.scheduler_config, "max_num_batched_tokens", max_num_batched_tokens)
        object.__setattr__(
            other.scheduler_config, "max_num_scheduled_tokens", max_num_scheduled_tokens
        )
        return LiveRule(other)

    def __repr__(self) -> str:
        return (
            f"LiveRule({type(self._scheduler).__name__}, block_size={self.block_size}, "
            f"max_num_batched_tokens={self.max_num_batched_tokens}, "
            f"scheduled_budget={self.scheduled_budget})"
        )


def chunk_rule(scheduler, vllm_version: str = vllm.__version__) -> ChunkRule:
    """The rule of a scheduler in align mode, as data.

    Raises:
        PlannerError: an unknown release; its rule is not guessed.
    """
    drafting = scheduler.vllm_config.speculative_config
    return ChunkRule(
        block_size=scheduler.cache_config.block_size,
        max_num_batched_tokens=scheduler.scheduler_config.max_num_batched_tokens,
        vllm_version=vllm_version,
        max_num_scheduled_tokens=scheduler.max_num_scheduled_tokens,
        long_prefill_token_threshold=scheduler.scheduler_config.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=getattr(
            scheduler, "adaptive_long_prefill_threshold", False
        ),
        draft_slots=drafting.max_num_new_slots_for_drafting if drafting else 0,
        scheduler_block_size=scheduler.block_size,
        hash_block_size=scheduler.hash_block_size,
        eagle_block_drop=scheduler.use_eagle_block_drop,
        hash_lookahead_tokens=getattr(scheduler, "num_hash_lookahead_tokens", 0),
        checkpoint_alignment=(
            scheduler.mamba_prefill_checkpoint_alignment
            if scheduler.mamba_has_prefill_checkpoint_blocks
            else None
        ),
        partial_hits=scheduler.mamba_partial_cache_hit,
        # appeared in 0.31
        shared_prefix_checkpoint=getattr(scheduler, "mamba_shared_prefix_checkpoint", False),
        prefill_lookahead_tokens=scheduler.num_prefill_lookahead,
    )


def _release(version: str) -> Release:
    """The release's habits around the split; those of the newest known one where it is newer."""
    newest = list(RELEASES.values())[-1]
    try:
        is_newer = _minor(version) > _minor(newest.version)
    except ValueError:
        is_newer = False
    return replace(newest, version=version) if is_newer else find_release(version)


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.removeprefix("v").split(".")[:2]
    return int(major), int(minor)
