"""Whole linear-attention prefill kernels of vLLM and flash-linear-attention, where importable.

They put the scan and the checkpoint price in proportion: one layer's mixer over the same chunk,
in rows of their own. Neither library is needed, and a release whose functions take other arguments
gives a row that says so.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from kernel_shapes import Shape

from chunk_planner.kernels import timing

# library, rule, module, function
KERNELS = (
    ("vllm", "gdn", "vllm.third_party.flash_linear_attention.ops", "chunk_gated_delta_rule"),
    ("vllm", "kda", "vllm.third_party.flash_linear_attention.ops.kda", "chunk_kda"),
    ("vllm", "ssd", "vllm.model_executor.layers.mamba.ops.ssd_combined",
     "mamba_chunk_scan_combined_varlen"),
    ("flash-linear-attention", "gdn", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    ("flash-linear-attention", "kda", "fla.ops.kda", "chunk_kda"),
)  # fmt: skip


def time_prefill(
    shape: Shape, limit_tokens: int, device: torch.device
) -> Iterator[dict[str, object]]:
    """One layer over a chunk of n blocks, batch 1, per library that has the shape's kernel."""
    for library, rule, module, function in KERNELS:
        if rule != shape.rule:
            continue
        row: dict[str, object] = {"kernel": function, "library": library}
        try:
            kernel = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError):
            continue
        except Exception as error:  # installed, and does not load beside this torch
            yield {**row, "error": _sentence(error)}
            continue
        for blocks in shape.prefill_blocks(limit_tokens):
            tokens = blocks * shape.geometry.block_size
            row["chunk_tokens"] = tokens
            make = _mamba2 if rule == "ssd" else _delta_rule
            try:
                calls = [make(kernel, shape, tokens, device) for _ in range(3)]
                yield {**row, **timing.time_calls({"prefill": calls})["prefill"].row()}
            except Exception as error:  # another library's, so anything; it costs its own rows only
                yield {**row, "error": _sentence(error)}
                break  # the larger chunks would say the same


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _delta_rule(
    kernel: Callable, shape: Shape, tokens: int, device: torch.device
) -> Callable[[], object]:
    """GDN takes one log decay per head and token, KDA one per key channel; queries as many heads
    as values have, as vLLM passes them after repeating."""
    heads, values, keys = shape.recurrent.shape
    normal = partial(torch.randn, device=device, dtype=torch.bfloat16)
    per_channel = (keys,) if shape.rule == "kda" else ()
    # vLLM keeps a head's state as [values, keys], flash-linear-attention by default transposed
    state = (keys, values) if kernel.__module__.startswith("fla.") else (values, keys)
    return partial(
        kernel,
        q=F.normalize(normal(1, tokens, heads, keys), dim=-1),
        k=F.normalize(normal(1, tokens, heads, keys), dim=-1),
        v=normal(1, tokens, heads, values),
        g=F.logsigmoid(torch.randn(1, tokens, heads, *per_channel, device=device)),
        beta=torch.rand(1, tokens, heads, device=device).to(torch.bfloat16),
        initial_state=torch.randn(1, heads, *state, device=device),
        output_final_state=True,
    )


def _mamba2(
    kernel: Callable, shape: Shape, tokens: int, device: torch.device
) -> Callable[[], object]:
    """SSD over one sequence, chunk lists as vLLM's metadata builder makes them."""
    heads, head_dim, state = shape.recurrent.shape
    size = shape.kernel_chunk_tokens
    channels = shape.geometry.state.conv.shape[-1]
    groups = max(1, (channels - heads * head_dim) // (2 * state))
    chunks = -(-tokens // size)
    int32 = partial(torch.tensor, dtype=torch.int32, device=device)
    normal = partial(torch.randn, device=device, dtype=torch.bfloat16)
    return partial(
        kernel,
        normal(tokens, heads, head_dim),
        normal(tokens, heads),
        -torch.rand(heads, device=device),
        normal(tokens, groups, state),
        normal(tokens, groups, state),
        chunk_size=size,
        cu_seqlens=int32([0, tokens]),
        cu_chunk_seqlens=int32([min(i * size, tokens) for i in range(chunks + 1)]),
        last_chunk_indices=int32([chunks - 1]),
        seq_idx=int32([0] * chunks),
        out=torch.empty(tokens, heads, head_dim, dtype=torch.bfloat16, device=device),
        D=torch.ones(heads, device=device),
        dt_bias=torch.zeros(heads, device=device),
        initial_states=torch.randn(1, heads, head_dim, state, device=device),
        dt_softplus=True,
        state_dtype=shape.state_dtype,
    )
