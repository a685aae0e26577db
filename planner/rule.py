"""The chunk rule: how many tokens of one request vLLM's scheduler takes in one step.

In `mamba_cache_mode="align"` a prefill chunk that does not finish the prompt ends on a multiple
of the block size, because the recurrent state can be cached only there. `ChunkRule.split` is that
rule as a pure function, equal to `Scheduler._mamba_block_aligned_split`
(`vllm/v1/core/sched/scheduler.py`) of the releases in `RELEASES`; `tests/compat` compares it with
each of them. Inside an engine the engine's own method is the truth: `engine/live_rule.py` offers it
through the same interface, `Rule`.
"""

from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Protocol

from chunk_planner.errors import PlannerError
from chunk_planner.release import RELEASES, SUPPORTED_VERSIONS, Release, find_release

__all__ = ["RELEASES", "SUPPORTED_VERSIONS", "ChunkRule", "Release", "Rule", "find_release"]


class Rule(Protocol):
    """What a plan needs to know of a scheduler. All attributes are read only.

    A class that derives from it supplies the attributes, `split` and `with_budget`; the rest has
    defaults. Sizes are in tokens, and so are positions: the number of tokens before them.
    """

    __slots__ = ()

    release: Release
    block_size: int
    #: the input budget: what all scheduled requests and their draft slots share
    max_num_batched_tokens: int
    #: the token budget, `max_num_scheduled_tokens` where set, else the input budget
    scheduled_budget: int
    #: input slots that drafting needs beside each scheduled request
    draft_slots: int
    long_prefill_token_threshold: int
    long_prefill_token_threshold_adaptive: bool
    #: a chunk leaves the prompt either nothing or at least this much (k in multi-module MTP)
    prefill_lookahead_tokens: int

    def split(
        self,
        start: int,
        num_new_tokens: int,
        num_prompt_tokens: int,
        num_tokens: int | None = None,
        shared_prefix_boundary: int = 0,
    ) -> int:
        """Tokens to schedule now of a request that stands at `start`.

        Args:
            start: tokens computed so far, prefix hits included.
            num_new_tokens: what the budgets and the threshold would let it have.
            num_prompt_tokens: length of the prompt.
            num_tokens: prompt and output so far (a resumed request replays its output);
                default: the prompt.
            shared_prefix_boundary: where the prefix it shares with an earlier request ends, 0 for
                none.

        Returns:
            0 to `num_new_tokens`. A request past its prefill gets `num_new_tokens`.
        """
        ...

    def with_budget(
        self, max_num_batched_tokens: int, max_num_scheduled_tokens: int | None = None
    ) -> "Rule":
        """The rule of the same engine started with other budgets."""
        ...

    def regular_until(
        self,
        start: int,
        num_prompt_tokens: int,
        num_tokens: int | None = None,
        shared_prefix_boundary: int = 0,
    ) -> int:
        """A position up to which `split` sees nothing but the block grid.

        While `start + num_new_tokens` does not exceed it, moving `start` by whole blocks does not
        change the split. That turns a long prompt into arithmetic. A rule that cannot know says
        `start`, and its prompts are planned step by step.
        """
        return start

    def caches_state(
        self, end: int, num_prompt_tokens: int, shared_prefix_boundary: int = 0
    ) -> bool:
        """Whether a chunk that ends at `end` leaves a state that a later request can start from."""
        return end % self.block_size == 0

    def exported_checkpoint(self, start: int, end: int, num_prompt_tokens: int) -> int:
        """The position whose state the final chunk saves from its inside, 0 for none."""
        return 0

    def threshold(self, num_requests: int) -> int:
        """The cap on one request's tokens with `num_requests` running or waiting, 0 for none."""
        threshold = self.long_prefill_token_threshold
        if threshold and self.release.lone_request_ignores_threshold:
            if num_requests <= 1:
                return 0
            if self.long_prefill_token_threshold_adaptive:
                return max(threshold, self.max_num_batched_tokens // num_requests)
        return threshold

    def reserve(self, num_tokens_left: int, num_new_tokens: int) -> int:
        """`num_new_tokens` cut so that the lookahead finds its tokens in the next chunk.

        Multi-module MTP drafts from the next k prompt tokens, so with `num_tokens_left` before
        the chunk, either all of them or at least k less are taken
        (`Scheduler._reserve_prefill_lookahead`).
        """
        rest = num_tokens_left - num_new_tokens
        if 0 < rest < self.prefill_lookahead_tokens:
            return max(num_new_tokens - self.prefill_lookahead_tokens + rest, 0)
        return num_new_tokens


#: Smallest value each number may have.
_LEAST = {
    "block_size": 1,
    "max_num_batched_tokens": 1,
    "max_num_scheduled_tokens": 1,
    "long_prefill_token_threshold": 0,
    "draft_slots": 0,
    "scheduler_block_size": 1,
    "hash_block_size": 1,
    "hash_lookahead_tokens": 0,
    "checkpoint_alignment": 1,
    "prefill_lookahead_tokens": 0,
}
_OPTIONAL = {
    "max_num_scheduled_tokens",
    "scheduler_block_size",
    "hash_block_size",
    "checkpoint_alignment",
}


@dataclass(frozen=True, slots=True)
class ChunkRule(Rule):
    """The rule of one engine setting, for when no engine is there. Sizes in tokens.

    Args:
        block_size: B, the block the split works on (`cache_config.block_size`).
        max_num_batched_tokens: the input budget of a step.
        vllm_version: a release in `SUPPORTED_VERSIONS` or a patch of one.
        max_num_scheduled_tokens: the token budget of a step; None: `max_num_batched_tokens`.
        long_prefill_token_threshold: cap on one request's tokens in a step, 0 for none.
        long_prefill_token_threshold_adaptive: raise the cap to an even share (from 0.31).
        draft_slots: input slots charged per scheduled request (1 for a draft model, 0 for MTP).
        scheduler_block_size: least common multiple of all groups' blocks; None: `block_size`.
        hash_block_size: the unit of prefix hashes; None: `scheduler_block_size`.
        eagle_block_drop: attention drops the last hit block, so the state is kept one unit lower.
        hash_lookahead_tokens: tokens after a block that its hash covers (from 0.33).
        checkpoint_alignment: the state can be exported inside the final chunk, at this
            alignment from its start; None: it cannot.
        partial_hits: prefix hits may end inside a block, on a hash unit.
        shared_prefix_checkpoint: stop exactly where a shared prefix ends, not on a block.
        prefill_lookahead_tokens: prompt tokens after a chunk that the drafter reads (1 for EAGLE
            and MTP, k for multi-module MTP).

    Raises:
        PlannerError: a value outside its range, by name.
    """

    block_size: int
    max_num_batched_tokens: int
    vllm_version: str = "0.33"
    max_num_scheduled_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    draft_slots: int = 0
    scheduler_block_size: int | None = None
    hash_block_size: int | None = None
    eagle_block_drop: bool = False
    hash_lookahead_tokens: int = 0
    checkpoint_alignment: int | None = None
    partial_hits: bool = False
    shared_prefix_checkpoint: bool = False
    prefill_lookahead_tokens: int = 0

    release: Release = field(init=False, repr=False, compare=False)
    scheduled_budget: int = field(init=False, repr=False, compare=False)
    _hash_unit: int = field(init=False, repr=False, compare=False)
    _checkpoint_unit: int = field(init=False, repr=False, compare=False)
    _most_tokens: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        release = find_release(self.vllm_version)
        self._check(release)
        budget = self.max_num_scheduled_tokens or self.max_num_batched_tokens
        scheduler_block = self.scheduler_block_size or self.block_size
        unit = self.hash_block_size or scheduler_block
        # Up to 0.31 the checkpoint of a final chunk is on a hash unit, later on what can be hit.
        fine = self.partial_hits or not release.boundary_leaves_a_token
        derived = {
            "vllm_version": release.version,
            "release": release,
            "scheduled_budget": budget,
            "_hash_unit": unit,
            "_checkpoint_unit": unit if fine else scheduler_block,
            # The raw threshold, also where a lone request ignores it.
            "_most_tokens": min(budget, self.long_prefill_token_threshold or budget),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _check(self, release: Release) -> None:
        for item in fields(self):
            if not item.init or item.name == "vllm_version":
                continue
            value = getattr(self, item.name)
            least = _LEAST.get(item.name)
            if least is None:
                if not isinstance(value, bool):
                    raise PlannerError(f"{item.name} = {value!r} must be True or False")
            elif value is None and item.name in _OPTIONAL:
                continue
            elif not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise PlannerError(
                    f"{item.name} = {value!r} must be an integer of at least {least}"
                )
            else:  # NumPy's integers are slow one by one, and wrap around
                object.__setattr__(self, item.name, int(value))
        scheduler_block = self.scheduler_block_size or self.block_size
        unit = self.hash_block_size or scheduler_block
        if scheduler_block % unit:
            raise PlannerError(
                f"hash_block_size = {unit} must divide scheduler_block_size = {scheduler_block}"
            )
        if self.partial_hits and unit == scheduler_block:
            raise PlannerError(
                f"partial_hits = True needs hash_block_size = {unit} to be smaller than "
                f"scheduler_block_size = {scheduler_block}"
            )
        if self.shared_prefix_checkpoint and not self.partial_hits:
            raise PlannerError("shared_prefix_checkpoint = True needs partial_hits = True")
        if self.hash_lookahead_tokens and not release.has_hash_lookahead:
            raise PlannerError(
                f"hash_lookahead_tokens = {self.hash_lookahead_tokens} must be 0 before vLLM 0.33 "
                f"(vllm_version = {release.version!r})"
            )
        if self.hash_lookahead_tokens and self.eagle_block_drop:
            raise PlannerError(
                f"eagle_block_drop = True needs hash_lookahead_tokens = 0, "
                f"not {self.hash_lookahead_tokens}: vLLM drops no block where hashes look ahead"
            )
        if self.long_prefill_token_threshold_adaptive and not release.has_adaptive_threshold:
            raise PlannerError(
                "long_prefill_token_threshold_adaptive = True must be False before vLLM 0.31 "
                f"(vllm_version = {release.version!r})"
            )

    def with_budget(
        self, max_num_batched_tokens: int, max_num_scheduled_tokens: int | None = None
    ) -> "ChunkRule":
        return replace(
            self,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_scheduled_tokens=max_num_scheduled_tokens,
        )

    def split(
        self,
        start: int,
        num_new_tokens: int,
        num_prompt_tokens: int,
        num_tokens: int | None = None,
        shared_prefix_boundary: int = 0,
    ) -> int:
        num_tokens = num_prompt_tokens if num_tokens is None else num_tokens
        # Replaying a resumed request's output is prefill too, up to its newest token.
        prefill_end = max(num_prompt_tokens, num_tokens - 1)
        if start >= prefill_end:
            return num_new_tokens
        block = self.block_size
        end = start + num_new_tokens
        if end >= prefill_end:
            exported = self.exported_checkpoint(start, end, prefill_end)
        else:
            exported = 0
            floor = end - end % block
            # A block wider than any chunk is crossed in parts; all others are kept whole.
            if floor > start or block <= self._most_tokens:
                end = floor
        if end <= start:  # in a busy step most splits end here: 0.4 of 1.3 us
            return 0
        stop = end
        if not exported:
            if start % block:
                stop = min(stop, start - start % block + block)
            last, tail = self._state_stops(num_prompt_tokens, num_tokens)
            if start < last < stop:
                stop = last
            if last < tail < num_prompt_tokens and start < tail < stop:
                stop = tail
        if start < shared_prefix_boundary < end:
            junction = self._junction_stop(start, num_prompt_tokens, shared_prefix_boundary)
            if start < junction < stop:
                stop = junction
        return stop - start

    def regular_until(
        self,
        start: int,
        num_prompt_tokens: int,
        num_tokens: int | None = None,
        shared_prefix_boundary: int = 0,
    ) -> int:
        num_tokens = num_prompt_tokens if num_tokens is None else num_tokens
        limit = max(num_prompt_tokens, num_tokens - 1) - 1
        stops = [*self._state_stops(num_prompt_tokens, num_tokens), shared_prefix_boundary]
        if shared_prefix_boundary > start:
            stops.append(self._junction_stop(start, num_prompt_tokens, shared_prefix_boundary))
        return max(start, min([limit, *(stop for stop in stops if stop > start)]))

    def caches_state(
        self, end: int, num_prompt_tokens: int, shared_prefix_boundary: int = 0
    ) -> bool:
        if end % self.block_size == 0:
            return True
        if self.shared_prefix_checkpoint and end == shared_prefix_boundary:
            return end <= num_prompt_tokens
        return self.partial_hits and end == self._state_stops(num_prompt_tokens, 0)[1]

    def exported_checkpoint(self, start: int, end: int, num_prompt_tokens: int) -> int:
        # The conditions of `is_mamba_prefill_checkpoint_valid`, vllm/v1/kv_cache_interface.py.
        alignment, unit = self.checkpoint_alignment, self._hash_unit
        if alignment is None or start % unit:
            return 0
        if self.release.boundary_leaves_a_token:
            checkpoint = self._reusable(num_prompt_tokens, self._checkpoint_unit)
        else:
            checkpoint = _floor(num_prompt_tokens - 1, self._checkpoint_unit, self.eagle_block_drop)
        block = self.block_size
        valid = (
            start + unit <= checkpoint < end
            and (checkpoint - start) % alignment == 0
            # a block column is free between the one the chunk starts from and the one it ends in
            and -(-end // block) - 2 > (start - 1) // block
        )
        return checkpoint if valid else 0

    def _state_stops(self, num_prompt_tokens: int, num_tokens: int) -> tuple[int, int]:
        """The last block boundary and, with partial hits, the last hash boundary to stop at."""
        if self.release.boundary_leaves_a_token:
            last = self._reusable(num_tokens, self.block_size)
            tail = self._reusable(num_prompt_tokens, self._hash_unit) if self.partial_hits else 0
            return last, tail
        last, tail = num_tokens, num_prompt_tokens if self.partial_hits else 0
        drop = self.eagle_block_drop
        return _floor(last, self.block_size, drop), _floor(tail, self._hash_unit, drop)

    def _reusable(self, num_tokens: int, unit: int) -> int:
        """The last multiple of `unit` from which a resend of `num_tokens` tokens can start."""
        if self.eagle_block_drop:
            return _floor(num_tokens, unit, True)
        return _floor(num_tokens - max(1, self.hash_lookahead_tokens), unit, False)

    def _junction_stop(self, start: int, num_prompt_tokens: int, junction: int) -> int:
        """Where a chunk stops for the shared prefix that ends at `junction`."""
        if self.shared_prefix_checkpoint and junction <= num_prompt_tokens:
            return junction
        return start + (junction - start) // self.block_size * self.block_size


def _floor(position: int, unit: int, drop: bool) -> int:
    """The last multiple of `unit` up to `position`, one unit lower with `drop`, at least 0."""
    return max(position - position % unit - (unit if drop else 0), 0)
