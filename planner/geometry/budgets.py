"""The budget and sequence limit vLLM picks where the user names none.

Source: `EngineArgs.get_batch_defaults` and `_set_default_max_num_seqs_and_batched_tokens_args`
(vllm/engine/arg_utils.py), equal in 0.30 to 0.32; 0.33 adds the rule for GB10.
"""

from typing import Literal, NamedTuple

from chunk_planner.errors import PlannerError
from chunk_planner.geometry.settings import find_device
from chunk_planner.rule import find_release

GIB = 2**30
UsageContext = Literal["server", "llm", "none"]
USAGE_CONTEXTS = ("server", "llm", "none")


class DefaultBudget(NamedTuple):
    """Tokens, sequences, and the sentence that says why."""

    max_num_batched_tokens: int
    max_num_seqs: int
    reason: str


def default_budget(
    total_device_bytes: int,
    usage_context: str = "server",
    vllm_version: str = "0.33",
    *,
    device_name: str | None = None,
    world_size: int = 1,
    max_model_len: int | None = None,
    performance_mode: str = "balanced",
    enable_chunked_prefill: bool = True,
) -> DefaultBudget:
    """What vLLM sets `max_num_batched_tokens` and `max_num_seqs` to.

    Args:
        total_device_bytes: the device's whole memory, not the share vLLM may use.
        usage_context: "server" (OpenAI API server), "llm" (the offline `LLM` class), or "none".
        device_name: A100 and, from 0.33 on, GB10 keep the small defaults whatever their memory.
        world_size: tensor times pipeline parallel size; counts on a CPU only.
        performance_mode: "throughput" doubles both.

    Raises:
        PlannerError: an unknown usage context, release or device.
    """
    if usage_context not in USAGE_CONTEXTS:
        raise PlannerError(
            f"usage_context = {usage_context!r} is not one of {', '.join(USAGE_CONTEXTS)}"
        )
    if total_device_bytes <= 0:
        raise PlannerError(f"total_device_bytes = {total_device_bytes} must be above 0")
    release = find_release(vllm_version).version
    device = find_device(device_name)
    name = (device_name or "").lower()
    small = "a100" in name or (device.capability == (12, 1) and release == "0.33")
    gib = f"{total_device_bytes / GIB:.0f} GiB"
    if device.platform == "cpu":
        by_context = {"llm": (4096 * world_size, 256 * world_size)}
        by_context["server"] = (2048 * world_size, 128 * world_size)
        why = f"CPU, {world_size} ranks"
    elif total_device_bytes >= 160 * GIB:
        by_context, why = {"llm": (16384, 1024), "server": (16384, 1024)}, f"{gib} >= 160 GiB"
    elif total_device_bytes >= 70 * GIB and not small:
        by_context, why = {"llm": (16384, 1024), "server": (8192, 1024)}, f"{gib} >= 70 GiB"
    else:
        by_context = {"llm": (8192, 256), "server": (2048, 256)}
        why = f"{device_name} keeps the small defaults" if small else f"{gib} < 70 GiB"
    tokens, seqs = by_context.get(usage_context, (2048, 128))
    if usage_context == "none":
        why = "no usage context"
    if performance_mode == "throughput":
        tokens, seqs, why = 2 * tokens, 2 * seqs, f"{why}, throughput mode doubles"
    if max_model_len is not None:
        if not enable_chunked_prefill:
            tokens = max(tokens, max_model_len)
        tokens = min(tokens, seqs * max_model_len)
    return DefaultBudget(
        tokens, min(seqs, tokens), f"vLLM {release} default for {usage_context}: {why}"
    )
