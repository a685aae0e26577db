"""The state shapes that the kernel sweep measures: a model's, on one rank, from its config."""

from dataclasses import dataclass

import torch

from chunk_planner.geometry import EngineSettings, Geometry, resolve
from chunk_planner.geometry.states import Part
from chunk_planner.kernels.state_checkpoint import StateTable

# Tokens that a linear-attention kernel takes at a time: flash-linear-attention's constant, and
# Nemotron-H's `chunk_size`, for a Mamba2 config that names none.
FLA_CHUNK_TOKENS = 64
SSD_CHUNK_TOKENS = 128

# What keys and values come in, so what a delta rule's products are taken in.
ACTIVATION_DTYPE = torch.bfloat16

# Each family as it is served; from the smallest state in use to the largest, because the price of a
# checkpoint is interpolated between those measured.
DEFAULT_SHAPES = (
    ("Qwen3-Next-80B-A3B", 4, "auto"),  # GDN, bfloat16, 9 MiB
    ("GLM-5.3-Flash", 8, "fp8"),  # KDA, 18 MiB
    ("NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 8, "auto"),  # Mamba2, 20 MiB
    ("Qwen3.5-35B-A3B", 1, "auto"),  # GDN, 61 MiB
    ("Qwen3.5-27B", 1, "auto"),  # GDN, 147 MiB
    ("NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 1, "auto"),  # Mamba2, 162 MiB
)


@dataclass(frozen=True)
class Shape:
    """One model on one rank. Layers are the linear-attention ones; sizes of one layer."""

    name: str
    geometry: Geometry

    @classmethod
    def of(cls, model: str, settings: EngineSettings) -> "Shape":
        """Raises PlannerError where `model` is no hybrid model that `geometry` knows."""
        geometry = resolve(model, settings)
        kv = "" if settings.kv_cache_dtype == "auto" else f" kv={settings.kv_cache_dtype}"
        return cls(f"{geometry.model} TP{settings.tensor_parallel_size}{kv}", geometry)

    @property
    def rule(self) -> str | None:
        """How a state follows from the last: "ssd", "gdn" or "kda"; None where no kernel here."""
        if len(self.recurrent.shape) != 3:
            return None  # Mamba1 has no heads, a short convolution no state
        return {"GDN": "gdn", "KDA": "kda"}.get(self.geometry.family, "ssd")

    @property
    def kernel_chunk_tokens(self) -> int:
        config = self.geometry.config
        if self.rule != "ssd":
            return FLA_CHUNK_TOKENS
        return config.integer("mamba_chunk_size", config.integer("chunk_size", SSD_CHUNK_TOKENS))

    @property
    def chunks_per_block(self) -> int:
        """Kernel chunks in a block; the last is short where the block is no multiple of them."""
        return -(-self.geometry.block_size // self.kernel_chunk_tokens)

    @property
    def recurrent(self) -> Part:
        return self.geometry.state.recurrent

    @property
    def state_dtype(self) -> torch.dtype:
        return getattr(torch, self.recurrent.dtype)

    def prefill_blocks(self, limit_tokens: int) -> list[int]:
        """Blocks in each chunk that the scheduler can make: 1 and up, as long as it fits."""
        return list(range(1, max(1, limit_tokens // self.geometry.block_size) + 1))

    def describe(self) -> dict[str, object]:
        """What the table's key and a reader need, with units in the names."""
        g = self.geometry
        return {
            "model": g.model,
            "tensor_parallel_size": g.settings.tensor_parallel_size,
            "kv_cache_dtype": g.kv_cache_dtype,
            "mamba_ssm_cache_dtype": g.mamba_ssm_cache_dtype,
            "family": g.family,
            "vllm_version": g.vllm_version,
            "block_size_tokens": g.block_size,
            "kernel_chunk_tokens": self.kernel_chunk_tokens,
            "layers": g.mamba_layers,
            "window_shape": list(g.state.conv.shape),
            "state_shape": list(g.state.recurrent.shape),
            "page_bytes": g.page_bytes,
            "checkpoint_bytes": g.checkpoint_bytes,
        }

    def cache(self, blocks: int, device: torch.device) -> tuple[list[torch.Tensor], StateTable]:
        """Random pages of every layer, and the states in them: window first, as vLLM lays out."""
        pages, states, windows = [], [], []
        for _ in range(self.geometry.mamba_layers):
            page = torch.empty(blocks, self.geometry.page_bytes, dtype=torch.uint8, device=device)
            pages.append(page.random_())
            offset = 0
            for part, is_window in ((self.geometry.state.conv, True), (self.recurrent, False)):
                if part.shape:
                    flat = page[:, offset : offset + part.bytes].view(getattr(torch, part.dtype))
                    states.append(flat.unflatten(1, part.shape))
                    windows.append(is_window)
                    offset += part.bytes
        return pages, StateTable.build(states, windows)

    def scan_operands(
        self, blocks: int, device: torch.device
    ) -> dict[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None]:
        """Random arguments of `scan_states` for one layer and a chunk of so many blocks."""
        heads, rows, channels = self.recurrent.shape
        chunks = blocks * self.chunks_per_block
        lead = (1, chunks, heads)
        per_channel = (channels,) if self.rule == "kda" else ()
        erase, out_dtype = None, self.state_dtype
        if self.rule != "ssd":
            # flash-linear-attention hands states on in the keys' dtype
            out_dtype = ACTIVATION_DTYPE
            # erases half of a state's size: an error in that part shows, and the state is bounded
            scale = (4 * self.kernel_chunk_tokens * channels) ** -0.25
            side = (*lead, self.kernel_chunk_tokens, channels)
            erase = tuple(
                (scale * torch.randn(side, device=device)).to(ACTIVATION_DTYPE) for _ in range(2)
            )
        full = (*lead, rows, channels)
        return {
            "decay": torch.rand(*lead, *per_channel, device=device),
            "update": torch.randn(full, device=device),
            "initial": torch.randn(1, *full[2:], device=device).to(self.state_dtype),
            "out": torch.full(full, float("nan"), dtype=out_dtype, device=device),
            "erase": erase,
        }

    def checkpoints(self, blocks: int, device: torch.device) -> torch.Tensor:
        """NaN-filled room for the state at the end of every block of such a chunk."""
        shape = (1, blocks, *self.recurrent.shape)
        return torch.full(shape, float("nan"), dtype=self.state_dtype, device=device)
