"""Tensors of a step planned on the device: what `chunk_plan` reads and writes, and their checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Requests in a step, all in the registers of one program.
MAX_REQUESTS = 1024
#: Rows of the workspace: what the visits read of each request.
_WORKSPACE_ROWS = 9


@dataclass(frozen=True)
class StepTensors:
    """Preallocated outputs of `plan_step` for R requests; tensors are contiguous on one device."""

    num_scheduled_tokens: torch.Tensor  # [R] int32, 0 for a request that has to wait
    chunk_end: torch.Tensor  # [R] int32, where the request stands afterwards
    query_start_loc: torch.Tensor  # [R + 1] int32, first token of each in the packed batch
    has_initial_state: torch.Tensor  # [R] bool, the chunk starts from a state
    is_checkpoint: torch.Tensor  # [R] bool, a prefill whose state is cached, at its end or inside
    checkpoint_column: torch.Tensor  # [R] int32, block-table column it goes to, -1 for none
    checkpoint_offsets: torch.Tensor  # [R] int32, tokens into the chunk of one inside it, or 0
    workspace: torch.Tensor  # [9, R] int32, overwritten

    @classmethod
    def empty(cls, num_requests: int, device: torch.device | str) -> StepTensors:
        """Uninitialised outputs for `num_requests` requests."""
        wanted = shapes(num_requests).items()
        return cls(**{n: torch.empty(s, dtype=t, device=device) for n, (s, t) in wanted})


def shapes(num_requests: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every field of `StepTensors`."""
    rows = (num_requests,)
    return {
        "num_scheduled_tokens": (rows, torch.int32),
        "chunk_end": (rows, torch.int32),
        "query_start_loc": ((num_requests + 1,), torch.int32),
        "has_initial_state": (rows, torch.bool),
        "is_checkpoint": (rows, torch.bool),
        "checkpoint_column": (rows, torch.int32),
        "checkpoint_offsets": (rows, torch.int32),
        "workspace": ((_WORKSPACE_ROWS, num_requests), torch.int32),
    }


def check(
    inputs: tuple[torch.Tensor, ...],
    is_waiting: torch.Tensor,
    shared_prefix_boundary: torch.Tensor | None,
    out: StepTensors,
) -> int:
    """The number of requests, from tensors that fit together; raises as `plan_step` says."""
    num_requests, device = len(inputs[0]), inputs[0].device
    if num_requests > MAX_REQUESTS:
        raise ValueError(
            f"a step of {num_requests} requests is too wide: the kernel plans up to "
            f"{MAX_REQUESTS}, chunk_planner.batch.plan_step any number on the host"
        )
    names = ("num_computed_tokens", "num_tokens", "num_prompt_tokens", "num_draft_tokens")
    rows = (num_requests,)
    expected = {
        name: (tensor, rows, torch.int32) for name, tensor in zip(names, inputs, strict=True)
    }
    expected["is_waiting"] = (is_waiting, rows, torch.bool)
    if shared_prefix_boundary is not None:
        expected["shared_prefix_boundary"] = (shared_prefix_boundary, rows, torch.int32)
    for name, (shape, dtype) in shapes(num_requests).items():
        expected[f"out.{name}"] = (getattr(out, name), shape, dtype)
    for name, (tensor, shape, dtype) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            found = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"{name} is {found}; it must be {dtype} {shape}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous; pass a contiguous tensor")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, num_computed_tokens on {device}")
    return num_requests
