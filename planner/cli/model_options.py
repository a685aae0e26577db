"""Flags that describe a model and its engine, under vLLM's names, and the settings they make."""

import argparse
import re

from chunk_planner.cli.options import count, json_object
from chunk_planner.errors import PlannerError
from chunk_planner.geometry import (
    DefaultBudget,
    EngineSettings,
    Geometry,
    MemorySettings,
    default_budget,
)
from chunk_planner.geometry.budgets import USAGE_CONTEXTS
from chunk_planner.rule import SUPPORTED_VERSIONS

_UNITS = {
    "": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9,
    "t": 10**12, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def size(text: str) -> int:
    """A number of bytes: `64GiB`, `80GB`, `1.5 GiB`, `68719476736`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].lower() not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 64GiB or 80GB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def add_model_arguments(
    parser: argparse.ArgumentParser, *, model: bool = True, rule_flags: bool = True
) -> None:
    """Add the flags of `settings_from`.

    Args:
        model: also the positional MODEL.
        rule_flags: also `--block-size`, `--vllm-version`, `--max-model-len` and
            `--num-speculative-tokens`; False where the command has them already.
    """
    add = parser.add_argument
    if model:
        add(
            "model",
            metavar="MODEL",
            help="folder with config.json, that file, or the name of a well-known model",
        )
    add("--tensor-parallel-size", "-tp", type=count, default=1, metavar="N")
    add("--pipeline-parallel-size", "-pp", type=count, default=1, metavar="N")
    add("--decode-context-parallel-size", "-dcp", type=count, default=1, metavar="N")
    add("--enable-expert-parallel", action="store_true")
    add("--dtype", default="auto", help="dtype of weights and activations")
    add("--kv-cache-dtype", default="auto", metavar="DTYPE", help="auto, bfloat16, fp8, ...")
    add("--kv-cache-dtype-skip-layers", nargs="+", default=(), metavar="LAYER")
    add("--mamba-cache-dtype", default="auto", metavar="DTYPE")
    add("--mamba-ssm-cache-dtype", default="auto", metavar="DTYPE")
    add("--speculative-config", type=json_object, metavar="JSON", help="as vLLM's")
    add("--attention-backend", metavar="NAME", help="as vLLM's; default: what vLLM tries first")
    add("--gdn-prefill-backend", default="auto", metavar="NAME")
    add(
        "--device-name",
        metavar="NAME",
        help="H100, B200, GB10, cpu, ...; decides vLLM's kernels (default: a Hopper GPU)",
    )
    if rule_flags:
        add("--num-speculative-tokens", type=count, metavar="K", help="drafted tokens per step")
        add("--block-size", type=count, metavar="TOKENS", help="the base block, as vLLM's")
        add("--max-model-len", type=count, metavar="TOKENS")
        add(
            "--vllm-version",
            default="",
            help=f"{', '.join(SUPPORTED_VERSIONS)} (default: the installed one, else the newest)",
        )


def settings_from(args: argparse.Namespace) -> EngineSettings:
    """The settings the flags of `add_model_arguments` describe.

    Raises:
        PlannerError: a value out of range, or two flags that contradict one another.
    """
    config = args.speculative_config or {}
    short = getattr(args, "num_speculative_tokens", None)
    if args.speculative_config is not None:
        tokens = config.get("num_speculative_tokens", short)
        for name, value in (("method", config.get("method")), ("num_speculative_tokens", tokens)):
            if value is None:
                raise PlannerError(
                    f"--speculative-config: {name} is missing; vLLM would look into the drafter's "
                    "own config, name it here"
                )
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise PlannerError(
                f"--speculative-config: num_speculative_tokens = {tokens!r} must be a whole "
                "number of at least 1"
            )
        if short is not None and short != tokens:
            raise PlannerError(
                f"--num-speculative-tokens {short} contradicts --speculative-config ({tokens})"
            )
    else:
        tokens = short or 0
    same = (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "enable_expert_parallel",
        "dtype",
        "kv_cache_dtype",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "block_size",
        "attention_backend",
        "gdn_prefill_backend",
        "device_name",
        "max_model_len",
        "vllm_version",
    )
    fields = {name: getattr(args, name) for name in same if hasattr(args, name)}
    fields["kv_cache_dtype_skip_layers"] = tuple(args.kv_cache_dtype_skip_layers)
    return EngineSettings(
        num_speculative_tokens=tokens, speculative_method=config.get("method"), **fields
    )


def add_memory_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the flags of `memory_from`. All numbers are of one device."""
    add = parser.add_argument
    add("--gpu-memory", type=size, required=required, metavar="SIZE", help="of one GPU: 64GiB")
    add("--gpu-memory-utilization", type=float, default=0.92, metavar="SHARE")
    add("--weight-bytes", type=size, metavar="SIZE", help="weights on one GPU, as vLLM logs them")
    add("--activation-bytes-per-token", type=size, metavar="SIZE", help="measured on one GPU")
    add("--graph-bytes", type=size, metavar="SIZE", help="CUDA graph pool of one GPU")
    add("--enforce-eager", action="store_true", help="no CUDA graphs")


def memory_from(args: argparse.Namespace, *, max_num_seqs: int = 256) -> MemorySettings | None:
    """The memory the flags describe; None without `--gpu-memory`. Raises PlannerError."""
    if args.gpu_memory is None:
        return None
    return MemorySettings(
        args.gpu_memory,
        gpu_memory_utilization=args.gpu_memory_utilization,
        weight_bytes=args.weight_bytes,
        activation_bytes_per_token=args.activation_bytes_per_token,
        graph_bytes=args.graph_bytes,
        max_num_seqs=max_num_seqs,
        enforce_eager=args.enforce_eager,
    )


def add_usage_context(parser: argparse.ArgumentParser) -> None:
    """Add the flag that, with the memory, decides vLLM's own budget."""
    parser.add_argument("--usage-context", choices=USAGE_CONTEXTS, default="server")


def default_budget_from(args: argparse.Namespace, geometry: Geometry) -> DefaultBudget:
    """What vLLM would set where the user names no budget; needs `--gpu-memory`."""
    settings = geometry.settings
    return default_budget(
        args.gpu_memory,
        args.usage_context,
        geometry.vllm_version,
        device_name=args.device_name,
        world_size=settings.tensor_parallel_size * settings.pipeline_parallel_size,
        max_model_len=geometry.max_model_len,
    )
