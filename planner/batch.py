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
        num_tokens: [R] int, prompt and output so far.
        num_prompt_tokens: [R] int.
        num_draft_tokens: [R] int, drafts that a running request carries; of a waiting one, how
            many placeholders vLLM would give it when a single token is left to compute (the
            engine's k). Drafts past `max_model_len` are the caller's to cut.
        is_waiting: [R] bool.
        shared_prefix_boundary: [R] int, where a prefix shared with an earlier request ends, 0 for
            none. None: none anywhere.
        max_num_seqs: sequence slots (`max_num_active_seqs` where that is set). None: no limit.

    Raises:
        PlannerError: arrays of different lengths, or a running request behind a waiting one.
    """
    start, tokens, prompt, drafts, waiting = _arrays(
        num_computed_tokens, num_tokens, num_prompt_tokens, num_draft_tokens, is_waiting
    )
    num_requests = len(start)
    num_running = num_requests - int(np.count_nonzero(waiting))
    if waiting[:num_running].any():
        raise PlannerError("is_waiting: running requests come first; sort them before the waiting")
    junctions = None
    if shared_prefix_boundary is not None:
        (junctions,) = _arrays(shared_prefix_boundary, length=num_requests)

    # Running decodes: what each asks for, and what those ahead of it take, all served in full.
    scheduled = tokens + drafts
    scheduled -= start
    threshold = rule.threshold(num_requests)
    if threshold:
        np.minimum(scheduled, threshold, out=scheduled)
    visited = start < np.maximum(prompt, tokens - 1)
    visited[num_running:] = True
    scheduled[visited] = 0
    np.maximum(scheduled, 0, out=scheduled)
    ahead = np.cumsum(scheduled, dtype=np.int64)  # at a visited request, that of all before it
    slots = rule.draft_slots
    charged = ahead
    if slots:
        charged = ahead + slots * np.cumsum(scheduled > 0)

    # The others, in order; `spent` and `slots_spent` are theirs alone.
    positions = np.flatnonzero(visited)
    rows = zip(
        positions.tolist(),
        start[positions].tolist(),
        tokens[positions].tolist(),
        prompt[positions].tolist(),
        drafts[positions].tolist(),
        [0] * len(positions) if junctions is None else junctions[positions].tolist(),
        (rule.scheduled_budget - ahead[positions]).tolist(),
        (rule.max_num_batched_tokens - slots - charged[positions]).tolist(),
        strict=True,
    )
    seats = num_requests if max_num_seqs is None else max_num_seqs - num_running
    split, reserve = rule.split, rule.reserve
    any_decode = bool(num_running) and bool(ahead[num_running - 1])
    prefill_runs = False
    spent = slots_spent = 0
    got_at, got, checkpoints = [], [], []
    for index, begin, total, prompt_end, extra, junction, token_budget, input_budget in rows:
        room = min(token_budget - spent, input_budget - spent - slots_spent)
        if room <= 0:
            break
        wanted = total - begin
        placeholders = 0
        if index < num_running:
            wanted += extra
        else:
            if seats <= 0 or wanted <= 0:
                break
            # vLLM pads a lone last token to the size of the running decodes, or lets it wait.
            if wanted == 1 and extra and not prefill_runs and (any_decode or begin):
                if 1 + extra > room:
                    break
                placeholders, wanted = extra, 1 + extra
        if threshold:
            wanted = min(wanted, threshold)
        aligned = split(begin, min(wanted, room), prompt_end, total, junction)
        if index >= num_running:
            if aligned == 0:
                break
            if placeholders and aligned != 1 + placeholders:
                aligned = 1
        size = reserve(total - begin, aligned)
        if size == 0:
            if index < num_running or rule.release.reserve_skips_waiting:
                continue
            break
        if index < num_running:
            prefill_runs = True
        else:
            seats -= 1
        spent += size
        slots_spent += slots
        got_at.append(index)
        got.append(size)
        end, prefill_end = begin + size, max(prompt_end, total - 1)
        if begin < prefill_end and (
            rule.caches_state(end, prompt_end, junction)
            or (end >= prefill_end and rule.exported_checkpoint(begin, end, prefill_end))
        ):
            checkpoints.append(index)

    if num_running:
        room = rule.scheduled_budget - ahead[num_running - 1] - spent
        if (
            min(room, rule.max_num_batched_tokens - charged[num_running - 1] - spent - slots_spent)
            < 0
        ):
            _cut_decodes(rule, scheduled, ahead, charged, got_at, got)
    scheduled[got_at] = got
    query_start_loc = np.zeros(num_requests + 1, np.int32)
    np.cumsum(scheduled, dtype=np.int32, out=query_start_loc[1:])
    is_checkpoint = np.zeros(num_requests, bool)
    is_checkpoint[checkpoints] = True
    return StepPlan(scheduled, start + scheduled, is_checkpoint, query_start_loc)


def _cut_decodes(
    rule: Rule,
    scheduled: NDArray[np.int32],
    ahead: NDArray[np.int64],
    charged: NDArray[np.int64],
    got_at: list[int],
    got: list[int],
) -> None:
    """Cut the decodes' tokens, in place, where a budget ended ahead of or inside them.

    `ahead` and `charged` count every decode in full. The first that is cut spends what is left of
    a budget, so nothing behind it is served either.
    """
    taken = np.zeros(len(scheduled), np.int64)
    taken[got_at] = got
    slots = rule.draft_slots
    room = rule.scheduled_budget - (ahead - scheduled) - np.cumsum(taken)
    taken[got_at] += slots
    own = scheduled + slots * (scheduled > 0)
    charged = charged - own + np.cumsum(taken)
    np.minimum(room, rule.max_num_batched_tokens - slots - charged, out=room)
    np.minimum(scheduled, np.maximum(room, 0), out=scheduled, casting="unsafe")


def _arrays(*values: ArrayLike, length: int | None = None) -> list[NDArray]:
    arrays = [np.asarray(value) for value in values]
    lengths = {array.shape for array in arrays}
    if length is not None:
        lengths.add((length,))
    if len(lengths) > 1 or arrays[0].ndim != 1:
        shapes = ", ".join(str(shape) for shape in sorted(lengths))
        raise PlannerError(
            f"a step's arrays have the shapes {shapes}; give each one entry a request"
        )
    for array in arrays:
        if array.dtype.kind not in "iub":
            raise PlannerError(f"a step's arrays hold integers or booleans, not {array.dtype}")
    return [
        array if array.dtype == bool else array.astype(np.int32, copy=False) for array in arrays
    ]
