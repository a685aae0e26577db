"""One scheduling step planned on the device, for captured graphs and schedulers without a host.

The step is `chunk_planner.batch.plan_step`, equal to it on every batch: running requests in
admission order, then waiting ones until the first that has to wait, two budgets, thresholds, draft
slots. A decode takes what it asks for until a budget ends, so all decodes together are a prefix sum
in the registers of one program; only prefills and waiting requests are visited one by one. The rule
is the caller's `ChunkRule`, read as plain data; no other rule can run on a device.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
import triton
import triton.language as tl

from chunk_planner.kernels.step_tensors import MAX_REQUESTS, StepTensors, check, shapes
from chunk_planner.kernels.variants import Variant

#: Triton 3.9 spills nothing with 4 or 8 warps; 3.6 spills 8 bytes on sm_90 with 4, on sm_80 with 8.
NUM_WARPS = 8


def plan_step(
    rule: Any,
    num_computed_tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    num_prompt_tokens: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    is_waiting: torch.Tensor,
    out: StepTensors,
    *,
    shared_prefix_boundary: torch.Tensor | None = None,
    max_num_seqs: int | None = None,
) -> StepTensors:
    """Plan one step of up to 1024 requests: one launch, one program, no host synchronisation.

    Args:
        rule: a `chunk_planner.ChunkRule`.
        num_computed_tokens: [R] int32, prefix hits included. R requests in scheduler order: the
            running ones as they were admitted, the waiting ones, then rows of zeros that pad the
            batch of a captured graph; those are not counted as requests and get nothing.
        num_tokens: [R] int32, prompt and output so far, at least `num_computed_tokens`.
        num_prompt_tokens: [R] int32.
        num_draft_tokens: [R] int32, drafts that a running request carries; of a waiting one, how
            many placeholders it gets when a single token is left to compute (the engine's k).
        is_waiting: [R] bool.
        out: the tensors to write.
        shared_prefix_boundary: [R] int32, where a prefix shared with an earlier request ends, 0
            for none. None: none anywhere.
        max_num_seqs: sequence slots (`max_num_active_seqs` where that is set). None: no limit.

    Returns:
        `out`.

    Raises:
        ValueError: more than 1024 requests, a rule other than `ChunkRule`, or a tensor of another
            dtype, shape, layout or device than documented.
    """
    inputs = (num_computed_tokens, num_tokens, num_prompt_tokens, num_draft_tokens)
    num_requests = check(inputs, is_waiting, shared_prefix_boundary, out)
    plan_step_kernel[(1,)](
        *inputs,
        is_waiting,
        shared_prefix_boundary,
        *(getattr(out, field.name) for field in fields(out)),
        num_requests,
        MAX_REQUESTS if max_num_seqs is None else max_num_seqs,
        **_parameters(rule),
        BLOCK=MAX_REQUESTS,
        num_warps=NUM_WARPS,
    )
    return out


def _parameters(rule: Any) -> dict[str, int | bool]:
    """The kernel's view of a rule: numbers at run time, what the release decides as constants."""
    try:
        alignment, release = rule.checkpoint_alignment, rule.release
        scheduler_block = rule.scheduler_block_size or rule.block_size
        hash_unit = rule.hash_block_size or scheduler_block
        fine = rule.partial_hits or not release.boundary_leaves_a_token
        threshold, budget = rule.long_prefill_token_threshold, rule.scheduled_budget
        return {
            "block_size": rule.block_size,
            "token_budget": budget,
            "input_budget": rule.max_num_batched_tokens,
            "draft_slots": rule.draft_slots,
            "threshold": threshold,
            "most_tokens": min(budget, threshold or budget),
            "lookahead": rule.prefill_lookahead_tokens,
            "hash_unit": hash_unit,
            "checkpoint_unit": hash_unit if fine else scheduler_block,
            "alignment": alignment or 1,
            "tokens_to_leave": max(1, rule.hash_lookahead_tokens),
            "HAS_CHECKPOINTS": alignment is not None,
            "PARTIAL_HITS": rule.partial_hits,
            "JUNCTION_CHECKPOINT": rule.shared_prefix_checkpoint,
            "BLOCK_DROP": rule.eagle_block_drop,
            "LEAVES_A_TOKEN": release.boundary_leaves_a_token,
            "LONE_IGNORES_THRESHOLD": release.lone_request_ignores_threshold,
            "ADAPTIVE": rule.long_prefill_token_threshold_adaptive,
            "RESERVE_SKIPS": release.reserve_skips_waiting,
        }
    except AttributeError as error:
        raise ValueError(
            f"{type(rule).__name__} cannot run on a device, it has no {error.name}; pass a "
            "ChunkRule, or plan with chunk_planner.batch.plan_step on the host"
        ) from None


@triton.jit
def _floor(position, unit, DROP: tl.constexpr):
    """The last multiple of `unit` up to `position`, one unit lower with DROP, at least 0."""
    position = tl.maximum(position, 0)
    floor = position - position % unit
    if DROP:
        floor = tl.maximum(floor - unit, 0)
    return floor


@triton.jit
def _reusable(num_tokens, unit, leave, LEAVE: tl.constexpr, DROP: tl.constexpr):
    """The last multiple of `unit` from which a resend of `num_tokens` tokens can start."""
    if LEAVE and not DROP:
        num_tokens -= leave
    return _floor(num_tokens, unit, DROP)


@triton.jit
def _exported_checkpoint(
    start, end, prefill_end, block_size, hash_unit, checkpoint_unit, alignment, leave,
    LEAVES_A_TOKEN: tl.constexpr, BLOCK_DROP: tl.constexpr,
):  # fmt: skip
    """The position whose state the final chunk saves from its inside, 0 for none."""
    if LEAVES_A_TOKEN:
        checkpoint = _reusable(prefill_end, checkpoint_unit, leave, True, BLOCK_DROP)
    else:
        checkpoint = _floor(prefill_end - 1, checkpoint_unit, BLOCK_DROP)
    valid = (end >= prefill_end) & (start % hash_unit == 0) & (checkpoint < end)
    valid &= start + hash_unit <= checkpoint
    valid &= tl.maximum(checkpoint - start, 0) % alignment == 0
    # Columns as ceilings: an integer division of -1 is not a floor on a device.
    end_column = (end + block_size - 1) // block_size
    start_column = (start + block_size - 1) // block_size
    valid &= end_column - 2 > start_column - 1
    return tl.where(valid, checkpoint, 0)


_NUMBERS = (
    "num_requests",
    "max_num_seqs",
    "block_size",
    "token_budget",
    "input_budget",
    "draft_slots",
    "threshold",
    "most_tokens",
    "lookahead",
    "hash_unit",
    "checkpoint_unit",
    "alignment",
    "tokens_to_leave",
)


# Nothing is specialised on a number: a batch of another size or another budget must not compile.
@triton.jit(do_not_specialize=_NUMBERS)
def plan_step_kernel(
    num_computed_tokens,  # [num_requests], like all inputs
    num_tokens,
    num_prompt_tokens,
    num_draft_tokens,
    is_waiting,
    shared_prefix_boundary,  # or None
    num_scheduled_tokens,  # [num_requests], like all outputs but two
    chunk_end,
    query_start_loc,  # [num_requests + 1]
    has_initial_state,
    is_checkpoint,
    checkpoint_column,
    checkpoint_offsets,
    workspace,  # [9, num_requests]
    num_requests,
    max_num_seqs,
    block_size,
    token_budget,
    input_budget,
    draft_slots,
    threshold,
    most_tokens,
    lookahead,
    hash_unit,
    checkpoint_unit,
    alignment,
    tokens_to_leave,
    HAS_CHECKPOINTS: tl.constexpr,
    PARTIAL_HITS: tl.constexpr,
    JUNCTION_CHECKPOINT: tl.constexpr,
    BLOCK_DROP: tl.constexpr,
    LEAVES_A_TOKEN: tl.constexpr,
    LONE_IGNORES_THRESHOLD: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    RESERVE_SKIPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.arange(0, BLOCK)
    mask = rows < num_requests
    start = tl.load(num_computed_tokens + rows, mask, 0)
    tokens = tl.load(num_tokens + rows, mask, 0)
    prompt = tl.load(num_prompt_tokens + rows, mask, 0)
    drafts = tl.load(num_draft_tokens + rows, mask, 0)
    waiting = tl.load(is_waiting + rows, mask, 0).to(tl.int32)
    junction = tl.full([BLOCK], 0, tl.int32)
    if shared_prefix_boundary is not None:
        junction = tl.load(shared_prefix_boundary + rows, mask, 0)

    present = tl.sum((tokens > 0).to(tl.int32), 0)  # padding holds no tokens
    free_seats = max_num_seqs - (present - tl.sum(waiting, 0))
    if LONE_IGNORES_THRESHOLD:
        if ADAPTIVE:
            share = tl.maximum(threshold, input_budget // tl.maximum(present, 1))
            threshold = tl.where(threshold > 0, share, 0)
        threshold = tl.where(present > 1, threshold, 0)
    # No threshold is one that never holds: nothing gets more than the budget anyway.
    threshold = tl.where(threshold > 0, threshold, token_budget)

    # Decodes: what each asks for, and what it and all ahead of it take, all served in full.
    prefill_end = tl.maximum(prompt, tokens - 1)
    visited = (waiting != 0) | (start < prefill_end)
    asks = tl.minimum(tl.maximum(tokens + drafts - start, 0), threshold)
    asks = tl.where(visited, 0, asks)
    taken = tl.cumsum(asks, 0)
    charged = taken + draft_slots * tl.cumsum((asks > 0).to(tl.int32), 0)

    # The others, packed, so that a visit waits for one load and not for two.
    visit = tl.cumsum(visited.to(tl.int32), 0) - 1
    num_visits = tl.sum(visited.to(tl.int32), 0)
    tl.store(workspace + visit, rows, visited)
    tl.store(workspace + num_requests + visit, start, visited)
    tl.store(workspace + 2 * num_requests + visit, tokens, visited)
    tl.store(workspace + 3 * num_requests + visit, prompt, visited)
    tl.store(workspace + 4 * num_requests + visit, drafts, visited)
    tl.store(workspace + 5 * num_requests + visit, waiting, visited)
    tl.store(workspace + 6 * num_requests + visit, junction, visited)
    tl.store(workspace + 7 * num_requests + visit, taken, visited)
    tl.store(workspace + 8 * num_requests + visit, charged, visited)
    tl.store(num_scheduled_tokens + rows, 0, mask)
    tl.debug_barrier()

    spent = tl.full([], 0, tl.int32)  # on the visited, and on these with their draft slots
    charged_to_them = tl.full([], 0, tl.int32)
    prefill_runs = tl.full([], 0, tl.int32)
    anything_runs = (tl.sum(asks, 0) > 0).to(tl.int32)
    k = tl.full([], 0, tl.int32)
    while k < num_visits:
        row = tl.load(workspace + k)
        begin = tl.load(workspace + num_requests + k)
        total = tl.load(workspace + 2 * num_requests + k)
        prompt_end = tl.load(workspace + 3 * num_requests + k)
        extra = tl.load(workspace + 4 * num_requests + k)
        waits = tl.load(workspace + 5 * num_requests + k)
        shared = tl.load(workspace + 6 * num_requests + k)
        ahead = tl.load(workspace + 7 * num_requests + k)
        charged_ahead = tl.load(workspace + 8 * num_requests + k)
        k += 1

        room = token_budget - ahead - spent
        room = tl.minimum(room, input_budget - draft_slots - charged_ahead - charged_to_them)
        room = tl.where((waits != 0) & (free_seats <= 0), 0, room)
        # vLLM pads a lone last token to the width of the decodes it joins, or lets it wait.
        joins = (total - begin == 1) & (prefill_runs == 0) & ((anything_runs != 0) | (begin > 0))
        padding = tl.where((waits != 0) & joins, extra, 0)
        room = tl.where((padding > 0) & (1 + padding > room), 0, room)
        wanted = total - begin + tl.where(waits != 0, padding, extra)
        wanted = tl.maximum(tl.minimum(tl.minimum(wanted, threshold), room), 0)

        # The split.
        stop_of_prefill = tl.maximum(prompt_end, total - 1)
        end = begin + wanted
        exported = begin * 0
        if HAS_CHECKPOINTS:
            exported = _exported_checkpoint(
                begin, end, stop_of_prefill, block_size, hash_unit, checkpoint_unit, alignment,
                tokens_to_leave, LEAVES_A_TOKEN, BLOCK_DROP,
            )  # fmt: skip
        on_grid = end - end % block_size
        floors = (end < stop_of_prefill) & ((on_grid > begin) | (block_size <= most_tokens))
        end = tl.where(floors, on_grid, end)
        stop = end
        boundary = begin - begin % block_size + block_size
        inside = (exported == 0) & (begin % block_size != 0)
        stop = tl.where(inside, tl.minimum(stop, boundary), stop)
        last = _reusable(total, block_size, tokens_to_leave, LEAVES_A_TOKEN, BLOCK_DROP)
        stop = tl.where((exported == 0) & (begin < last) & (last < stop), last, stop)
        if PARTIAL_HITS:
            tail = _reusable(prompt_end, hash_unit, tokens_to_leave, LEAVES_A_TOKEN, BLOCK_DROP)
            holds = (exported == 0) & (last < tail) & (tail < prompt_end)
            stop = tl.where(holds & (begin < tail) & (tail < stop), tail, stop)
        if shared_prefix_boundary is not None:
            # A device divides -1 to 0, not to -1, so only a distance ahead is floored.
            to_junction = tl.maximum(shared - begin, 0)
            junction_stop = begin + to_junction - to_junction % block_size
            if JUNCTION_CHECKPOINT:
                junction_stop = tl.where(shared <= prompt_end, shared, junction_stop)
            holds = (begin < shared) & (shared < end)
            holds &= (begin < junction_stop) & (junction_stop < stop)
            stop = tl.where(holds, junction_stop, stop)
        aligned = tl.where(begin < stop_of_prefill, tl.maximum(stop - begin, 0), wanted)

        aligned = tl.where((padding > 0) & (aligned > 0) & (aligned <= padding), 1, aligned)
        rest = total - begin - aligned
        size = tl.maximum(aligned - lookahead + rest, 0)
        size = tl.where((rest > 0) & (rest < lookahead), size, aligned)

        if size > 0:
            tl.store(num_scheduled_tokens + row, size)
            spent += size
            charged_to_them += size + draft_slots
            free_seats -= waits
            prefill_runs += 1 - waits
            anything_runs += 1 - waits
        else:
            # A budget is spent, or the head of the queue has to wait: nothing behind it is tried.
            blocks = waits != 0
            if RESERVE_SKIPS:
                blocks &= aligned == 0
            if blocks | (room <= 0):
                k = num_visits
    tl.debug_barrier()

    # A decode gets what the budgets leave it; the first one that is cut spends what is left.
    size = tl.load(num_scheduled_tokens + rows, mask, 0)
    room = token_budget - (taken - asks) - tl.cumsum(size, 0)
    slots = draft_slots * (tl.cumsum((size > 0).to(tl.int32), 0) + 1)
    charged_ahead = charged - asks - draft_slots * (asks > 0).to(tl.int32)
    room = tl.minimum(room, input_budget - charged_ahead - tl.cumsum(size, 0) - slots)
    size = tl.where(visited, size, tl.minimum(asks, tl.maximum(room, 0)))
    end = start + size
    tl.store(num_scheduled_tokens + rows, size, mask)
    tl.store(chunk_end + rows, end, mask)
    tl.store(query_start_loc + 1 + rows, tl.cumsum(size, 0), mask)
    tl.store(query_start_loc, 0)
    tl.store(has_initial_state + rows, start > 0, mask)

    prefills = (size > 0) & (start < prefill_end)
    caches = end % block_size == 0
    if JUNCTION_CHECKPOINT:
        caches |= (end == junction) & (end <= prompt)
    if PARTIAL_HITS:
        caches |= end == _reusable(prompt, hash_unit, tokens_to_leave, LEAVES_A_TOKEN, BLOCK_DROP)
    exported_at = tl.full([BLOCK], 0, tl.int32)
    if HAS_CHECKPOINTS:
        exported_at = _exported_checkpoint(
            start, end, prefill_end, block_size, hash_unit, checkpoint_unit, alignment,
            tokens_to_leave, LEAVES_A_TOKEN, BLOCK_DROP,
        )  # fmt: skip
        exported_at = tl.where(prefills, exported_at, 0)
    caches = prefills & (caches | (exported_at > 0))
    # The column that holds the end, or the one before where the state is saved from inside.
    column = (end + block_size - 1) // block_size - 1
    column = tl.where(exported_at > 0, column - 1, column)
    tl.store(is_checkpoint + rows, caches, mask)
    tl.store(checkpoint_column + rows, tl.where(caches, column, -1), mask)
    tl.store(checkpoint_offsets + rows, tl.where(exported_at > 0, exported_at - start, 0), mask)


_FLAGS = (
    "HAS_CHECKPOINTS",
    "PARTIAL_HITS",
    "JUNCTION_CHECKPOINT",
    "BLOCK_DROP",
    "LEAVES_A_TOKEN",
    "LONE_IGNORES_THRESHOLD",
    "ADAPTIVE",
    "RESERVE_SKIPS",
)


def _variant(name: str, *flags: str, junctions: bool = True) -> Variant:
    outputs = {n: "*i1:16" if t == torch.bool else "*i32:16" for n, (_, t) in shapes(1).items()}
    inputs = ("num_computed_tokens", "num_tokens", "num_prompt_tokens", "num_draft_tokens")
    signature = {**dict.fromkeys(inputs, "*i32:16"), "is_waiting": "*i1:16"}
    constexprs = {flag: flag in flags for flag in _FLAGS}
    if junctions:
        signature["shared_prefix_boundary"] = "*i32:16"
    else:
        constexprs["shared_prefix_boundary"] = None
    return Variant(
        name=name,
        kernel=plan_step_kernel,
        signature={**signature, **outputs, **dict.fromkeys(_NUMBERS, "i32")},
        constexprs={**constexprs, "BLOCK": MAX_REQUESTS},
        num_warps=NUM_WARPS,
    )


VARIANTS = [
    _variant("plan_step_0_30", junctions=False),
    _variant(
        "plan_step_0_33",
        "LEAVES_A_TOKEN",
        "LONE_IGNORES_THRESHOLD",
        "RESERVE_SKIPS",
        junctions=False,
    ),
    _variant("plan_step_everything", *(flag for flag in _FLAGS if flag != "BLOCK_DROP")),
    _variant("plan_step_block_drop", *_FLAGS),
]
