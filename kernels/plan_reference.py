"""The step that `chunk_plan` plans on the device, in plain Python: what its kernel must equal."""

from __future__ import annotations

from typing import Any

import torch

from chunk_planner.kernels.step_tensors import StepTensors, check


def plan_step_reference(
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
    """`plan_step` request by request on the host, with the rule's own methods; for any rule."""
    inputs = (num_computed_tokens, num_tokens, num_prompt_tokens, num_draft_tokens)
    check(inputs, is_waiting, shared_prefix_boundary, out)
    starts, totals, prompts, drafts = (tensor.tolist() for tensor in inputs)
    waits = is_waiting.tolist()
    junctions = [0] * len(starts)
    if shared_prefix_boundary is not None:
        junctions = shared_prefix_boundary.tolist()
    present = sum(total > 0 for total in totals)
    seats = present if max_num_seqs is None else max_num_seqs
    seats -= present - sum(waits)
    threshold, slots = rule.threshold(present), rule.draft_slots
    tokens_left, inputs_left = rule.scheduled_budget, rule.max_num_batched_tokens
    sizes = [0] * len(starts)
    columns, offsets = [-1] * len(starts), [0] * len(starts)
    prefill_runs = False
    for row, (start, total, prompt) in enumerate(zip(starts, totals, prompts, strict=True)):
        room = min(tokens_left, inputs_left - slots)
        if room <= 0 or (waits[row] and seats <= 0):
            break
        prefill_end = max(prompt, total - 1)
        padding = 0
        if not waits[row]:
            wanted = total + drafts[row] - start
        else:
            wanted = total - start
            if wanted == 1 and not prefill_runs and (start > 0 or any(sizes[: waits.index(True)])):
                padding = drafts[row]
            if padding and 1 + padding > room:
                break
            wanted += padding
        wanted = max(0, min(wanted, threshold or wanted, room))
        aligned = rule.split(start, wanted, prompt, total, junctions[row])
        if 0 < aligned <= padding:
            aligned = 1
        size = rule.reserve(total - start, aligned)
        if size == 0:
            if waits[row] and not (aligned and rule.release.reserve_skips_waiting):
                break
            continue
        if waits[row]:
            seats -= 1
        else:
            prefill_runs |= start < prefill_end
        sizes[row] = size
        tokens_left -= size
        inputs_left -= size + slots
        end = start + size
        if start < prefill_end:
            inside = rule.exported_checkpoint(start, end, prefill_end) if end >= prefill_end else 0
            if inside or rule.caches_state(end, prompt, junctions[row]):
                columns[row] = -(-end // rule.block_size) - (2 if inside else 1)
            offsets[row] = inside - start if inside else 0

    results = {
        "num_scheduled_tokens": sizes,
        "chunk_end": [start + size for start, size in zip(starts, sizes, strict=True)],
        "query_start_loc": [sum(sizes[:row]) for row in range(len(sizes) + 1)],
        "has_initial_state": [start > 0 for start in starts],
        "is_checkpoint": [column >= 0 for column in columns],
        "checkpoint_column": columns,
        "checkpoint_offsets": offsets,
    }
    for name, values in results.items():
        tensor = getattr(out, name)
        tensor.copy_(torch.tensor(values, dtype=tensor.dtype))
    return out
