"""The granularity of the block: what the attention kernels and the checkpoints make it.

Sources: each backend's `get_supported_kernel_block_sizes`, `_get_backend_priorities`
(vllm/platforms/cuda.py), `update_block_size_for_backend` and `_align_hybrid_block_size`
(vllm/platforms/interface.py), and vllm/platforms/{cpu,xpu}.py.
"""

from dataclasses import dataclass
from math import lcm

from chunk_planner.errors import PlannerError
from chunk_planner.geometry.attention import Attention
from chunk_planner.geometry.checkpoints import Checkpoint
from chunk_planner.geometry.families import Family
from chunk_planner.geometry.kv_dtype import (
    DS_MLA,
    FP8,
    NVFP4,
    PER_TOKEN_HEAD,
    TURBOQUANT,
    ULTRAQUANT,
    is_mla,
    is_sparse,
)
from chunk_planner.geometry.settings import EngineSettings
from chunk_planner.models.config import ModelConfig

#: attention backend -> smallest kernel block in tokens
KERNEL_BLOCK = {
    "FLASH_ATTN": 16,
    "FLASHINFER": 16,
    "TRITON_ATTN": 16,
    "TRITON_FLASH_ATTN": 16,
    "TRITON_FLASHINFER": 16,
    "FLEX_ATTENTION": 16,
    "TURBOQUANT": 16,
    "ULTRAQUANT": 1,
    "ROCM_ATTN": 16,
    "ROCM_AITER_FA": 16,
    "ROCM_AITER_UNIFIED_ATTN": 16,
    "B12X": 64,
    "HPC_ATTN": 64,
    "CPU_ATTN": 32,
    "FLASHMLA": 64,
    "FLASHMLA_SPARSE": 64,
    "CUTLASS_MLA": 128,
    "FLASHINFER_MLA": 32,
    "FLASHINFER_MLA_SPARSE": 32,
    "FLASHINFER_MLA_SPARSE_SM90": 64,
    "FLASHINFER_MLA_SPARSE_SM120": 64,
    "FLASH_ATTN_MLA": 16,
    "FLASH_ATTN_MLA_SPARSE": 64,
    "FLASH_ATTN_MLA_SPARSE_FA4": 64,
    "TRITON_MLA": 16,
    "TOKENSPEED_MLA": 32,
    "ROCM_SEGMENTED_ATTN": 16,
    "ROCM_AITER_MLA": 1,
    "ROCM_AITER_TRITON_MLA": 1,
    "ROCM_AITER_MLA_SPARSE": 1,
    "CPU_MLA": 16,
    "AMX_MLA": 32,
}
# Backends that ask for more than their smallest kernel block where no --block-size is given.
_PREFERRED = {"ROCM_AITER_UNIFIED_ATTN": 64, "ULTRAQUANT": 64, "B12X": 128}

#: vLLM's `CacheConfig.DEFAULT_BLOCK_SIZE`, and the CPU platform's own
DEFAULT_BLOCK, CPU_BLOCK = 16, 128
#: the MLA decode kernels want whole 128-token groups of kernel blocks
MLA_FLOOR = 128
#: vLLM's `FA4_HD256_PAGE_SIZE`: FlashAttention 4 with a head of 256 on SM10x and SM11x
_FA4_HEAD_256_PAGE = 128
#: the XPU GDN kernel's block
_XPU_GDN_BLOCK = 64


@dataclass(frozen=True)
class Grid:
    """How the block may grow, in tokens.

    Attributes:
        step: the block is this many tokens times the least number that holds the state.
        rounding: and is then rounded up to a multiple of this.
        base: the block is never smaller.
        kernel: smallest kernel block of the attention backend.
        words: what made `step`.
    """

    step: int
    rounding: int
    base: int
    kernel: int
    words: str

    @property
    def tokens(self) -> int:
        return lcm(self.step, self.rounding)


def attention_backend(config: ModelConfig, settings: EngineSettings, dtype: str) -> str:
    """The backend asked for, else the one vLLM tries first for `dtype` on this device."""
    if settings.attention_backend:
        name = settings.attention_backend.upper()
        if name not in KERNEL_BLOCK:
            raise PlannerError(
                f"attention_backend = {name!r} is not one of {', '.join(KERNEL_BLOCK)}"
            )
        return name
    device = settings.device
    if dtype in TURBOQUANT:
        return "TURBOQUANT"
    if dtype == ULTRAQUANT:
        return "ULTRAQUANT"
    if device.platform == "cpu":
        # Without AMX vLLM turns prefix caching off for MLA on a CPU, and with it the alignment.
        return "AMX_MLA" if is_mla(config) else "CPU_ATTN"
    if device.platform == "rocm":
        if not is_mla(config):
            return "ROCM_ATTN"
        return "ROCM_AITER_MLA_SPARSE" if is_sparse(config) else "ROCM_AITER_MLA"
    major = device.capability[0]
    if not is_mla(config):
        if dtype in PER_TOKEN_HEAD:
            return "TRITON_ATTN"
        return "FLASHINFER" if major == 10 or dtype in NVFP4 else "FLASH_ATTN"
    if is_sparse(config):
        if dtype in DS_MLA and major != 12:
            return "FLASHMLA_SPARSE"
        by_major = {10: "FLASHINFER_MLA_SPARSE", 12: "FLASHINFER_MLA_SPARSE_SM120"}
        sm90 = "FLASH_ATTN_MLA_SPARSE"
        if config.integer("qk_rope_head_dim", 0, minimum=0) == 0:
            sm90 = "FLASHINFER_MLA_SPARSE_SM90"
        return by_major.get(major, sm90)
    return {9: "FLASH_ATTN_MLA", 10: "FLASHINFER_MLA"}.get(major, "TRITON_MLA")


def _kernel_block(settings: EngineSettings, backend: str, cache: Attention) -> int:
    if backend != "FLASH_ATTN":
        return KERNEL_BLOCK[backend]
    device, fp8 = settings.device, cache.kv_cache_dtype in ("fp8", "fp8_e4m3")
    major = device.capability[0] if device.platform == "cuda" else 0
    if device.platform == "xpu":
        return 64
    # FlashAttention 4 pages, for heads that only it takes.
    if major in (10, 11) and cache.head_size == 256 and cache.kv_cache_dtype not in FP8:
        return _FA4_HEAD_256_PAGE
    if settings.release >= (0, 31) and major == 9 and fp8 and cache.head_size == 512:
        return 64
    return KERNEL_BLOCK[backend]


def _indexer_block(config: ModelConfig, settings: EngineSettings) -> int:
    """Smallest kernel block of the indexer's own cache; 1 for a model without one."""
    if not is_sparse(config):
        return 1
    pool, cuda = config.integer("index_kpool", 1), settings.device.platform == "cuda"
    if pool == 1:
        return 64 if cuda else 1
    if not cuda and settings.release < (0, 32):
        return 1
    # The paged logits kernel reads 32 or 64 pooled entries at a time, on SM120 only 64.
    return pool * (64 if settings.device.capability[0] == 12 else 32)


def grid(
    config: ModelConfig,
    settings: EngineSettings,
    backend: str,
    cache: Attention,
    checkpoint: Checkpoint,
    family: Family,
) -> Grid:
    """The grid of one engine."""
    kernel = _kernel_block(settings, backend, cache)
    indexer = _indexer_block(config, settings)
    base = settings.block_size
    if base is None:
        if settings.device.platform == "cpu":
            base = CPU_BLOCK
        else:
            base = _PREFERRED.get(backend, kernel)
            base = base if DEFAULT_BLOCK % kernel or backend in _PREFERRED else DEFAULT_BLOCK
            if settings.release >= (0, 32):
                base = lcm(base, indexer)
    step, words = max(kernel, base), f"{backend} kernel block {kernel}, base block {base}"
    if is_mla(config):
        step = max(step, MLA_FLOOR)
        words += f", MLA floor {MLA_FLOOR}"
    if settings.release >= (0, 33) and checkpoint.block_alignment > 1:
        step = lcm(step, checkpoint.block_alignment)
        words += f", checkpoint alignment {checkpoint.block_alignment}"
    rounding = 1
    if settings.release >= (0, 32):
        rounding = lcm(kernel, indexer)
    elif config.integer("index_kpool", 1) > 1:
        rounding = indexer
    if settings.device.platform == "xpu" and family.name == "GDN":
        rounding = lcm(rounding, _XPU_GDN_BLOCK)
    if step % rounding:
        words += f", kernel blocks {rounding}"
    return Grid(step, rounding, base, kernel, words)
