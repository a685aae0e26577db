"""From a model's config and vLLM's flags to the block size and the bytes behind it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chunk_planner.errors import PlannerError
from chunk_planner.geometry import grid as grids
from chunk_planner.geometry.attention import Attention, attention
from chunk_planner.geometry.checkpoints import prefill_checkpoint
from chunk_planner.geometry.families import Family, find_family, full_attention
from chunk_planner.geometry.kv_dtype import (
    model_dtype,
    requested_kv_cache_dtype,
    stored_kv_cache_dtype,
)
from chunk_planner.geometry.settings import EngineSettings
from chunk_planner.geometry.state import State
from chunk_planner.geometry.state_dtypes import state_dtypes
from chunk_planner.models.config import ModelConfig, load_config


@dataclass(frozen=True)
class Geometry:
    """Block, state and KV cache of one model on one rank; bytes and tokens.

    Attributes:
        block_size: tokens; what vLLM logs as "Setting attention block size to N tokens".
        padding_percent: what the state page is padded by to fill that block.
        grid_tokens: the block is a multiple of this.
        attention_bytes_per_token: what one attention layer adds to the block per token.
        conv_bytes, recurrent_bytes: the two parts of one layer's state.
        state_bytes_per_layer: their sum, before padding.
        mamba_layers, attention_layers: of the whole model.
        checkpoint_bytes: one state checkpoint, all layers, without padding.
        kv_bytes_per_token: one token, all attention layers.
        notes: what decided, where it is not obvious.
        page_bytes: a block of one attention layer, and the padded state of one layer.
        checkpoint_blocks: state blocks per request that mid-chunk export needs (0 or 1).
        checkpoint_alignment: the token grid of that export; None without it.
        max_model_len: the setting, else the config's; None where neither says.
        config, settings, attention, state, grid: what it was computed from.
    """

    model: str
    family: str
    vllm_version: str
    block_size: int
    padding_percent: float
    grid_tokens: int
    attention_bytes_per_token: int
    conv_bytes: int
    recurrent_bytes: int
    state_bytes_per_layer: int
    mamba_layers: int
    attention_layers: int
    checkpoint_bytes: int
    kv_bytes_per_token: int
    kv_cache_dtype: str
    mamba_ssm_cache_dtype: str
    attention_backend: str
    page_bytes: int
    checkpoint_blocks: int
    checkpoint_alignment: int | None
    max_model_len: int | None
    notes: tuple[str, ...]
    config: ModelConfig
    settings: EngineSettings
    attention: Attention
    state: State
    grid: grids.Grid

    @property
    def num_speculative_tokens(self) -> int:
        return self.settings.num_speculative_tokens

    @property
    def state_blocks_per_request(self) -> int:
        """State blocks one running request holds in each state group: 2 + k + export."""
        return 2 + self.num_speculative_tokens + self.checkpoint_blocks

    def to_json(self) -> dict[str, Any]:
        """The answer without what it was computed from."""
        inner = {"config", "settings", "attention", "state", "grid"}
        found = {k: v for k, v in vars(self).items() if k not in inner}
        found["padding_percent"] = round(self.padding_percent, 2)
        found["notes"] = list(self.notes)
        found["settings"] = {
            k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.settings).items()
        }
        return found


def resolve(
    model: str | Path | dict[str, Any] | ModelConfig, settings: EngineSettings | None = None
) -> Geometry:
    """The geometry of `model` under `settings`, as vLLM works it out at start-up.

    Args:
        model: a folder with config.json, that file, a well-known name, or the parsed file.
        settings: vLLM's flags; vLLM's defaults where left out.

    Raises:
        PlannerError: no hybrid model, an unknown architecture, a missing or contradictory
            field, a size the ranks cannot share.
    """
    settings = settings or EngineSettings()
    config = model if isinstance(model, ModelConfig) else load_config(model)
    family = find_family(config)
    counts = family.layers(config)
    if not counts.mamba:
        raise full_attention(config)
    if not counts.attention:
        raise PlannerError(f"{config.name}: no attention layers, block alignment does not apply")
    _check_release(config, settings, family)

    asked, asked_notes = requested_kv_cache_dtype(config, settings)
    backend = grids.attention_backend(config, settings, asked)
    stored, stored_notes = stored_kv_cache_dtype(asked, backend)
    cache = attention(config, settings, stored, (*asked_notes, *stored_notes))
    dtype = model_dtype(config, settings)
    dtypes, dtype_notes = state_dtypes(config, settings, family, dtype)
    state = family.state(config, settings, dtypes)
    checkpoint, checkpoint_notes = prefill_checkpoint(config, settings, family, dtype)
    grid = grids.grid(config, settings, backend, cache, checkpoint, family)

    # `_align_hybrid_block_size`: the least block on the grid that holds the state.
    block = grid.step * -(-state.bytes // (grid.step * cache.sizing_bytes))
    block = max(grid.base, grid.rounding * -(-block // grid.rounding))
    page = block * cache.sizing_bytes
    if cache.skip_bytes:
        block = _cover_skipped_layers(block, page, state.bytes, cache, grid)
        page = block * cache.page_bytes
    notes = (*_release_notes(config, settings, family), *dtype_notes, *cache.notes)
    if cache.is_mla and cache.page_bytes != cache.sizing_bytes:
        notes += (_record_note(cache, grid, state.bytes),)
    return Geometry(
        model=config.name,
        family=family.name,
        vllm_version=settings.vllm_version,
        block_size=block,
        padding_percent=100 * (page - state.bytes) / state.bytes,
        grid_tokens=grid.tokens,
        attention_bytes_per_token=cache.sizing_bytes,
        conv_bytes=state.conv.bytes,
        recurrent_bytes=state.recurrent.bytes,
        state_bytes_per_layer=state.bytes,
        mamba_layers=counts.mamba,
        attention_layers=counts.attention,
        checkpoint_bytes=counts.mamba * state.bytes,
        kv_bytes_per_token=counts.attention * cache.page_bytes,
        kv_cache_dtype=dtype if cache.kv_cache_dtype == "auto" else cache.kv_cache_dtype,
        mamba_ssm_cache_dtype=state.recurrent.dtype if state.recurrent.shape else dtypes.conv,
        attention_backend=backend,
        page_bytes=page,
        checkpoint_blocks=checkpoint.blocks,
        checkpoint_alignment=checkpoint.alignment or (block if checkpoint.blocks else None),
        max_model_len=settings.max_model_len
        or config.integer("max_position_embeddings", config.get("model_max_length")),
        notes=(*notes, *checkpoint_notes),
        config=config,
        settings=settings,
        attention=cache,
        state=state,
        grid=grid,
    )


def _record_note(cache: Attention, grid: grids.Grid, state: int) -> str:
    """MLA records that carry more than the latent: start-up logs of older builds differ."""
    tokens = grid.step * -(-state // (grid.step * cache.page_bytes))
    padding = 100 * (tokens * cache.page_bytes - state) / state
    return (
        f"a token takes {cache.page_bytes} B as {cache.kv_cache_dtype}, but vLLM 0.30 to 0.33 size "
        f"the block by the {cache.sizing_bytes} B of its latent; builds before 0.30 counted the "
        f"whole record, {tokens} tokens and {padding:.2f} % padding here"
    )


def _cover_skipped_layers(
    block: int, page: int, state: int, cache: Attention, grid: grids.Grid
) -> int:
    """`_align_heterogeneous_kv_block_size`: quantized and unquantized layers share the pool.

    The quantized page must hold a kernel block of the unquantized layers and the padded state.
    """
    if cache.skip_bytes == cache.page_bytes:
        return block
    needed = max(cache.skip_bytes * grid.kernel, page if page != state else 0)
    step = max(grid.kernel, block)
    return max(block, step * -(-needed // (step * cache.page_bytes)))


def _check_release(config: ModelConfig, settings: EngineSettings, family: Family) -> None:
    if settings.release < family.since:
        since = ".".join(map(str, family.since))
        raise PlannerError(
            f"vllm_version = {settings.vllm_version}: {config.architecture} came with {since}"
        )


def _release_notes(
    config: ModelConfig, settings: EngineSettings, family: Family
) -> tuple[str, ...]:
    if family.last_release == "none":
        return (f"vLLM has no {config.architecture}; sized as its relatives are",)
    if family.last_release:
        return (
            f"{config.architecture} left vLLM after {family.last_release}; sized by the rule of "
            f"{settings.vllm_version}",
        )
    return ()
