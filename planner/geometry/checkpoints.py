"""State that prefill kernels export from inside a chunk, and the block grid it asks for.

Sources: the layers' `get_kv_cache_spec` (mamba_mixer2.py, kda.py, qwen_gdn_linear_attn.py) and
`get_mamba_prefill_checkpoint_alignment` (vllm/model_executor/layers/mamba/abstract.py, 0.33).
"""

from dataclasses import dataclass

from chunk_planner.geometry.families import Family
from chunk_planner.geometry.settings import EngineSettings
from chunk_planner.models.config import ModelConfig

#: `FLASHINFER_GDN_CHECKPOINT_ALIGNMENT`
_GDN_CHECKPOINT = 64


@dataclass(frozen=True)
class Checkpoint:
    """State a backend can export from inside the final chunk.

    Attributes:
        blocks: state blocks per request kept for it.
        alignment: token grid of the export; None without one.
        block_alignment: what it makes the block a multiple of (from 0.33 on).
    """

    blocks: int = 0
    alignment: int | None = None
    block_alignment: int = 1


def prefill_checkpoint(
    config: ModelConfig, settings: EngineSettings, family: Family, model_dtype: str
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Whether this family's prefill kernels export a checkpoint mid-chunk, and the notes on it."""
    release, device = settings.release, settings.device
    if family.name == "Mamba2" and release >= (0, 32):
        return Checkpoint(1, 1), ()
    if family.name == "GDN":
        return _gdn_checkpoint(config, settings)
    exporting = ("KimiLinear", "KimiK3") if release < (0, 32) else ("KimiLinear", "KimiK3", "Glm5")
    if family.name == "KDA" and config.architecture.startswith(exporting):
        linear = config.mapping("linear_attn_config")
        bounded = linear.get("gate_lower_bound", config.get("linear_lower_bound")) is not None
        head = linear.get("head_dim", config.get("linear_head_dim"))
        supported = (
            device.platform == "cuda"
            and device.capability[0] in (9, 10, 12)
            and head == 128
            and model_dtype == "bfloat16"
            and bounded
        )
        if supported and settings.kda_prefill_backend in ("auto", "flashkda"):
            return Checkpoint(1, 16), _assumed(settings, "FlashKDA prefill")
    return Checkpoint(), ()


def _gdn_checkpoint(
    config: ModelConfig, settings: EngineSettings
) -> tuple[Checkpoint, tuple[str, ...]]:
    if settings.release < (0, 33) or not config.architecture.startswith(
        ("Qwen3Next", "Qwen3_5", "Qwen4Exp", "MiniCPMV4")
    ):
        return Checkpoint(), ()
    device, backend = settings.device, settings.gdn_prefill_backend
    major = device.capability[0]
    # On SM10x and SM12x FlashInfer also needs CUDA 13; vLLM's wheels are built with it.
    supported = device.platform == "cuda" and (
        major == 9 or (major in (10, 12) and config.integer("linear_key_head_dim") == 128)
    )
    if not supported or backend not in ("auto", "flashinfer"):
        return Checkpoint(), ()
    notes = () if backend == "flashinfer" else _assumed(settings, "FlashInfer GDN prefill")
    return Checkpoint(1, None, _GDN_CHECKPOINT), notes


def _assumed(settings: EngineSettings, what: str) -> tuple[str, ...]:
    if not settings.device.assumed:
        return ()
    return (
        f"{what} assumed, as 'auto' picks it on a Hopper GPU; name another device with "
        "--device-name",
    )
