"""Step plan and chunk lists: the device kernels against the host path they replace.

The host path is what an engine does without them: plan or build lists on the CPU, copy them over.
Three times per row: `on_device` is the kernel alone (replayed graph), `launched_from_host` the same
launch as a Python caller sees it, `host_path` the other way, both to the end of the device's work.
Their few KiB stay in the L2 here, as they would between the steps of an engine.
"""

from collections.abc import Iterator
from dataclasses import fields
from functools import partial

import numpy as np
import torch
from kernel_shapes import Shape

from chunk_planner import batch
from chunk_planner.kernels import timing
from chunk_planner.kernels.chunk_metadata import (
    ChunkMetadata,
    chunk_metadata,
    chunk_metadata_reference,
    max_chunks,
)
from chunk_planner.kernels.chunk_plan import plan_step
from chunk_planner.kernels.plan_reference import plan_step_reference
from chunk_planner.kernels.step_tensors import StepTensors
from chunk_planner.kernels.testing import assert_close
from chunk_planner.rule import ChunkRule

SEQUENCES = (1, 16, 128, 1024)
PREFILLS = 2  # beside the decodes of a step; each longer than the budget


def check_plan(shape: Shape, limit_tokens: int, device: torch.device) -> None:
    """Both kernels against their references, on every batch that is timed."""
    for sequences in SEQUENCES:
        for run, reference, make in (
            (plan_step, plan_step_reference, _step),
            (chunk_metadata, chunk_metadata_reference, _prefills),
        ):
            got, expected = (make(shape, sequences, limit_tokens, device) for _ in range(2))
            run(**got)
            reference(**expected)
            for field in fields(expected["out"]):
                wanted = getattr(expected["out"], field.name)
                if wanted is not None and field.name != "workspace":
                    name = f"{run.__name__}, {sequences} sequences: {field.name}"
                    assert_close(name, getattr(got["out"], field.name), wanted)


def time_plan(shape: Shape, limit_tokens: int, device: torch.device) -> Iterator[dict[str, object]]:
    """One row per kernel and number of sequences."""
    for sequences in SEQUENCES:
        for run, make, host_path in (
            (plan_step, _step, _plan_on_host),
            (chunk_metadata, _prefills, _lists_on_host),
        ):
            on_device = make(shape, sequences, limit_tokens, device)
            on_host = make(shape, sequences, limit_tokens, "cpu")
            launch = partial(run, **on_device)
            yield {
                "kernel": run.__name__,
                "sequences": sequences,
                "budget_tokens": limit_tokens,
                "on_device": timing.time_calls({"kernel": [launch]})["kernel"].row(),
                "launched_from_host": timing.time_host(launch).row(),
                "host_path": timing.time_host(partial(host_path, on_host, on_device["out"])).row(),
            }


def _step(shape: Shape, sequences: int, limit_tokens: int, device: object) -> dict[str, object]:
    """A step of decodes, then prefills midway through a prompt four budgets long."""
    decodes = max(0, sequences - PREFILLS)
    prompt = torch.full((sequences,), 4 * limit_tokens, dtype=torch.int32)
    computed = torch.where(torch.arange(sequences) < decodes, prompt, shape.geometry.block_size)
    total = torch.where(torch.arange(sequences) < decodes, prompt + 1, prompt)
    return {
        "rule": ChunkRule(shape.geometry.block_size, limit_tokens, shape.geometry.vllm_version),
        "num_computed_tokens": computed.to(torch.int32).to(device),
        "num_tokens": total.to(torch.int32).to(device),
        "num_prompt_tokens": prompt.to(device),
        "num_draft_tokens": torch.zeros(sequences, dtype=torch.int32, device=device),
        "is_waiting": torch.zeros(sequences, dtype=torch.bool, device=device),
        "out": StepTensors.empty(sequences, device),
    }


def _plan_on_host(step: dict[str, object], target: StepTensors) -> None:
    arrays = {
        name: tensor.numpy() for name, tensor in step.items() if isinstance(tensor, torch.Tensor)
    }
    plan = batch.plan_step(step["rule"], **arrays)
    for name in ("num_scheduled_tokens", "chunk_end", "query_start_loc", "is_checkpoint"):
        built = torch.from_numpy(np.ascontiguousarray(getattr(plan, name)))
        getattr(target, name).copy_(built, non_blocking=True)


def _prefills(shape: Shape, sequences: int, limit_tokens: int, device: object) -> dict[str, object]:
    """A packed batch of prefills that fill the budget, and room for its family's chunk lists."""
    size = shape.kernel_chunk_tokens
    bounds = torch.linspace(0, limit_tokens, sequences + 1).to(torch.int32)
    room = max_chunks(limit_tokens, sequences, size)

    def room_for(*dims: int) -> torch.Tensor:
        return torch.full(dims, -7, dtype=torch.int32, device=device)

    if shape.rule == "ssd":
        out = ChunkMetadata(
            cu_chunk_seqlens=room_for(room + 1),
            seq_idx=room_for(room),
            last_chunk_indices=room_for(sequences),
        )
    else:
        out = ChunkMetadata(chunk_indices=room_for(room, 2), chunk_offsets=room_for(sequences + 1))
    return {"query_start_loc": bounds.to(device), "chunk_size": size, "out": out}


def _lists_on_host(prefills: dict[str, object], target: ChunkMetadata) -> None:
    built = chunk_metadata_reference(**prefills)
    for field in fields(built):
        tensor = getattr(built, field.name)
        if tensor is not None:
            getattr(target, field.name).copy_(tensor, non_blocking=True)
