"""Tiny random-weight hybrid models that the real engine serves on a laptop's CPU.

Only a `config.json` is written; the engine makes up the weights (`load_format="dummy"`) and needs
no tokenizer (prompts are token ids).

In process: `LLM(model=str(path), **tiny_engine_args(block))`. As a server:
`python -m vllm.entrypoints.openai.api_server --model PATH` with `tiny_server_flags(block)`
(vLLM's CPU wheel has no working `vllm serve`; /v1/completions takes token ids).

Both want `TINY_ENGINE_ENV` in the environment before vLLM is imported.
"""

import json
from pathlib import Path

from chunk_planner.errors import PlannerError

#: One OpenMP thread, not bound to a core. With vLLM's own binding, on a 2-core machine others use
#: too, 4,000 tokens of a 1024-channel model spent 38 s in convolutions, 0.2 s this way: without
#: AVX-512 BF16 every channel is a parallel region of its own. 1 GiB of KV cache holds over a
#: million tokens of these models.
TINY_ENGINE_ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}

_COMMON = {
    "torch_dtype": "bfloat16",  # vLLM's CPU GDN kernel takes nothing else
    "vocab_size": 512,
    "hidden_size": 64,
    "max_position_embeddings": 131072,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
_QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    # The smallest the CPU kernel takes: its time grows with the square, and on a CPU without
    # AVX-512 BF16 it is most of a token's cost, where a step's fixed cost is what should show.
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_GRANITE4 = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "mamba", "mamba", "attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "intermediate_size": 128,
    "shared_intermediate_size": 128,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
}
# family -> its config, the block it is made for, KV heads it can have, and one layer's state in
# bytes at most (convolution channels x 3 columns in bf16, recurrent state in fp32, which is what
# a CPU with AVX-512 BF16 keeps; others keep bf16). Granite's attention head is hidden_size / heads
# wide and the CPU kernel takes 64, so hidden_size 64 means one head.
_FAMILIES = {
    "qwen3-next": (_QWEN3_NEXT, 1152, tuple(range(1, 9)), 192 * 3 * 2 + 64 * 64 * 4),
    "granite-4": (_GRANITE4, 384, (1,), 384 * 3 * 2 + 128 * 128 * 4),
}
_KV_BYTES_PER_HEAD = 2 * 64 * 2  # K and V of one token, 64 wide, bf16


def write_tiny_model(
    folder: str | Path, family: str = "qwen3-next", block: int | None = None
) -> Path:
    """Write `config.json` of a tiny hybrid model into `folder` (made if missing); return `folder`.

    family: "qwen3-next" (GDN + attention, MoE) or "granite-4" (Mamba2 + attention).
    block: block size in tokens the engine will be given with `--block-size`; a multiple of 32.
        Default 1152 (qwen3-next), 384 (granite-4). The model gets as many KV heads as it takes for
        one block of attention to hold a layer's state: then `--block-size` is the block, on any
        CPU. Without the flag the block follows the CPU's state dtype.
    """
    if family not in _FAMILIES:
        raise PlannerError(f"family is {family!r}; it must be one of {', '.join(_FAMILIES)}")
    config, default_block, head_choices, state_bytes = _FAMILIES[family]
    block = default_block if block is None else block
    smallest = -(-state_bytes // (head_choices[-1] * _KV_BYTES_PER_HEAD * 32)) * 32
    if block % 32 or block < smallest:
        raise PlannerError(
            f"block is {block}; a tiny {family} takes multiples of 32 from {smallest} on"
        )
    heads = next(n for n in head_choices if n * _KV_BYTES_PER_HEAD * block >= state_bytes)
    config = _COMMON | config | {"num_attention_heads": heads, "num_key_value_heads": heads}
    config["num_hidden_layers"] = len(config["layer_types"])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def tiny_engine_args(block: int) -> dict:
    """vLLM engine arguments the tiny models need, beside the model itself."""
    return {
        "block_size": block,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        # compiling takes a minute; eager starts in seconds and costs a tiny model nothing
        "enforce_eager": True,
        "enable_prefix_caching": True,
    }


def tiny_server_flags(block: int) -> list[str]:
    """`tiny_engine_args` as flags of `python -m vllm.entrypoints.openai.api_server`."""
    flags = []
    for name, value in tiny_engine_args(block).items():
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags.append(str(value))
    return flags


def keep_mamba2_without_checkpoints() -> None:
    """Keep Mamba2 layers of engines started later in this process from declaring checkpoint blocks.

    vLLM 0.32 exports a state from inside the last chunk of every Mamba2 prefill; its CPU kernels
    fail there with an index error. Without the declaration the scheduler ends a chunk on the block
    boundary instead, as it does for GDN. In-process engines on a CPU only.
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec
