"""One scheduling step over arrays, for scheduler hot paths and sweeps.

Decodes take what they ask for until a budget ends, so all of them together are a prefix sum; only
prefills and waiting requests are visited one by one, with the rule's own `split`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chunk_planner.errors import PlannerError
from chunk_planner.rule import Rule


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step schedules of R requests, in scheduler order. Sizes and positions in tokens."""

    num_scheduled_tokens: NDArray[np.int32]  # [R], 0 for a request that has to wait
    chunk_end: NDArray[np.int32]  # [R], where the request stands afterwards
    is_checkpoint: NDArray[np.bool_]  # [R], a prefill whose state is cached, at the end or inside
    query_start_loc: NDArray[np.int32]  # [R + 1], first token of each request in the packed batch


def plan_step(
    rule: Rule,
    num_computed_tokens: ArrayLike,
    num_tokens: ArrayLike,
    num_prompt_tokens: ArrayLike,
    num_draft_tokens: ArrayLike,
    is_waiting: ArrayLike,
    *,
    shared_prefix_boundary: ArrayLike | None = None,
    max_num_seqs: int | None = None,
) -> StepPlan:
    """Plan one step of `Scheduler.schedule`, KV cache unlimited.

    Args:
        rule: a `ChunkRule`, or a live scheduler's (`chunk_planner.engine.live_rule`).
        num_computed_tokens: [R] int, prefix hits included. R requests in scheduler order: the
            running ones as they were admitted, then the waiting ones.
        num_tokens: [R] int, prompt and output so far, at least `num_computed_tokens`.
        num_prompt_tokens: [R] int.
        num_draft_tokens: [R] int, drafts that a running request carries; of a waiting one, how
            many placeholders vLLM would give it when a single token is left to compute (the
            engine's k). Drafts past `max_model_len` are the caller's to cut.
        is_waiting: [R] bool.
        shared_prefix_boundary: [R] int, where a prefix shared with an earlier request ends, 0 for
            none. None: none anywhere.
        max_num_seqs: sequence slots (`max_num_active_seqs` where that is set). None: no limit.

    Raises:
        PlannerError: arrays of different lengths or of no integers, more computed tokens than a
            request has, or a running request behind a waiting one.
    """
    start, tokens, prompt, drafts, waiting = _arrays(
        num_computed_tokens, num_tokens, num_prompt_tokens, num_draft_tokens, is_waiting
    )
    num_requests = len(start)
    num_running = num_requests - int(np.count_nonzero(waiting))
    if waiting[:num_running].any():
        raise PlannerError("is_waiting: running requests come first; sort them before the waiting")
    if (start > tokens).any():
        index = int((start > tokens).argmax())
        raise PlannerError(
            f"num_computed_tokens[{index}] = {start[index]} must be at most num_tokens[{index}] = "
            f"{tokens[index]}"
        )
    junctions = np.zeros_like(start)
    if shared_prefix_boundary is not None:
        (junctions,) = _arrays(shared_prefix_boundary, length=num_requests)

    # What each decode asks for; `taken` and `charged` count it and all decodes ahead in full.
    threshold, slots = rule.threshold(num_requests), rule.draft_slots
    prefills = (start < np.maximum(tokens - 1, prompt))[:num_running].nonzero()[0]
    scheduled = tokens + drafts
    scheduled -= start
    if threshold:
        np.minimum(scheduled, threshold, out=scheduled)
    scheduled[prefills] = 0
    scheduled[num_running:] = 0
    np.maximum(scheduled, 0, out=scheduled)
    taken = np.add.accumulate(scheduled, dtype=np.int64)
    charged = taken + slots * np.add.accumulate(scheduled > 0, dtype=np.int64) if slots else taken

    token_budget, input_budget = rule.scheduled_budget, rule.max_num_batched_tokens - slots
    sizes: dict[int, int] = {}  # of prefills and waiting requests, in order
    spent = charged_to_them = 0
    columns = (start, tokens, prompt, drafts, junctions, taken, charged)
    rows = zip(prefills.tolist(), *(column[prefills].tolist() for column in columns), strict=True)
    for index, begin, total, prompt_end, extra, junction, ahead, charged_ahead in rows:
        room = min(token_budget - ahead - spent, input_budget - charged_ahead - charged_to_them)
        if room <= 0:
            break
        wanted = min(total - begin + extra, room)
        if threshold:
            wanted = min(wanted, threshold)
        aligned = rule.split(begin, wanted, prompt_end, total, junction)
        # A running prefill that gets nothing holds up nobody.
        if aligned and (size := rule.reserve(total - begin, aligned)):
            sizes[index] = size
            spent += size
            charged_to_them += size + slots

    any_decode = bool(num_requests) and bool(taken[-1])
    if num_requests:
        token_budget -= int(taken[-1])
        input_budget -= int(charged[-1])
    prefill_runs, anything_runs = bool(sizes), bool(sizes) or any_decode
    free_seats = num_requests if max_num_seqs is None else max_num_seqs - num_running
    for index in range(num_running, num_requests):
        room = min(token_budget - spent, input_budget - charged_to_them)
        if room <= 0 or free_seats <= 0:
            break
        begin, total, placeholders = int(start[index]), int(tokens[index]), int(drafts[index])
        wanted = total - begin
        # vLLM pads a lone last token to the width of the decodes it joins, or lets it wait.
        if wanted != 1 or prefill_runs or not (anything_runs or begin):
            placeholders = 0
        if placeholders and wanted + placeholders > room:
            break
        wanted = min(wanted + placeholders, room)
        if threshold:
            wanted = min(wanted, threshold)
        aligned = rule.split(begin, wanted, int(prompt[index]), total, int(junctions[index]))
        if aligned == 0:
            break
        if placeholders and aligned != 1 + placeholders:
            aligned = 1
        if size := rule.reserve(total - begin, aligned):
            sizes[index] = size
            spent += size
            charged_to_them += size + slots
            free_seats -= 1
        elif not rule.release.reserve_skips_waiting:
            break

    if min(token_budget - spent, input_budget + slots - charged_to_them) < 0:
        _cut_decodes(rule, scheduled, taken, charged, sizes)
    query_start_loc = np.zeros(num_requests + 1, np.int32)
    is_checkpoint = np.zeros(num_requests, bool)
    for index, size in sizes.items():
        scheduled[index] = size
        is_checkpoint[index] = _leaves_checkpoint(
            rule, int(start[index]), size, int(tokens[index]), int(prompt[index]), junctions[index]
        )
    np.add.accumulate(scheduled, out=query_start_loc[1:])
    return StepPlan(scheduled, start + scheduled, is_checkpoint, query_start_loc)


def _leaves_checkpoint(
    rule: Rule, start: int, size: int, num_tokens: int, num_prompt_tokens: int, junction: int
) -> bool:
    """Whether a chunk of `size` tokens from `start` is prefill and leaves a cached state."""
    end, prefill_end = start + size, max(num_prompt_tokens, num_tokens - 1)
    if start >= prefill_end:
        return False
    if rule.caches_state(end, num_prompt_tokens, junction):
        return True
    return end >= prefill_end and rule.exported_checkpoint(start, end, prefill_end) > 0


def _cut_decodes(
    rule: Rule,
    scheduled: NDArray[np.int32],
    taken: NDArray[np.int64],
    charged: NDArray[np.int64],
    sizes: dict[int, int],
) -> None:
    """Cut the decodes' tokens, in place, where a budget ended ahead of or inside them.

    The first that is cut spends what is left of a budget, so nothing behind it is served either.
    """
    slots = rule.draft_slots
    others, slots_of_others = np.zeros((2, len(scheduled)), np.int64)
    others[list(sizes)] = list(sizes.values())
    slots_of_others[list(sizes)] = slots
    ahead = taken - scheduled + np.cumsum(others)
    charged_ahead = charged - scheduled - slots * (scheduled > 0) + np.cumsum(others)
    charged_ahead += np.cumsum(slots_of_others) + slots
    room = np.minimum(rule.scheduled_budget - ahead, rule.max_num_batched_tokens - charged_ahead)
    np.minimum(scheduled, np.maximum(room, 0), out=scheduled, casting="unsafe")


def _arrays(*values: ArrayLike, length: int | None = None) -> list[NDArray]:
    arrays = [np.asarray(value) for value in values]
    shapes = {array.shape for array in arrays}
    if length is not None:
        shapes.add((length,))
    if len(shapes) > 1 or arrays[0].ndim != 1:
        listed = ", ".join(str(shape) for shape in sorted(shapes))
        raise PlannerError(
            f"a step's arrays have the shapes {listed}; give each one entry a request"
        )
    for array in arrays:
        if array.dtype.kind not in "iub" and array.size:
            raise PlannerError(f"a step's arrays hold integers or booleans, not {array.dtype}")
    return [
        array if array.dtype == bool else array.astype(np.int32, copy=False) for array in arrays
    ]
