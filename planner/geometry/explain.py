"""The arithmetic of the block size, in the steps people take by hand."""

from chunk_planner.geometry.resolve import Geometry
from chunk_planner.geometry.settings import DTYPE_BYTES


def explain(geometry: Geometry) -> list[str]:
    """Lines from the state's shape to the block, each with its numbers (rule, one rank)."""
    g, lines = geometry, []
    for name, part in (("convolution", g.state.conv), ("recurrent", g.state.recurrent)):
        if part.shape:
            width = DTYPE_BYTES[part.dtype]
            lines.append(f"{name}: {part.words} x {width} B ({part.dtype}) = {part.bytes} B")
    lines.append(
        f"state: {g.conv_bytes} + {g.recurrent_bytes} = {g.state_bytes_per_layer} B per layer"
    )
    lines.append(f"KV per token and layer: {g.attention.words} = {g.attention_bytes_per_token} B")
    tokens = g.state_bytes_per_layer / g.attention_bytes_per_token
    lines.append(
        f"tokens that outweigh a state: {g.state_bytes_per_layer} / "
        f"{g.attention_bytes_per_token} = {tokens:.2f}"
    )
    lines.append(f"grid: {g.grid_tokens} tokens ({g.grid.words})")
    lines.append(
        f"block: {tokens:.2f} rounded up to {g.grid_tokens} = {g.block_size} tokens"
        + ("" if g.block_size > g.grid.base else f" (not below the base block {g.grid.base})")
    )
    page = g.page_bytes
    lines.append(
        f"padding: {g.block_size} x {g.attention_bytes_per_token} = {page} B, "
        f"{page - g.state_bytes_per_layer} B over the state = {g.padding_percent:.2f} %"
    )
    lines.append(
        f"checkpoint: {g.mamba_layers} layers x {g.state_bytes_per_layer} = {g.checkpoint_bytes} B"
    )
    return lines
