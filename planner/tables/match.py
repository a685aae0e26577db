"""When a table fits an engine: what must agree, and what is only mentioned."""

#: Another value means other step times: the table is refused.
HARD = (
    "device_name",
    "device_count",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "expert_parallel",
    "geometry_hash",
    "weight_dtype",
    "kv_cache_dtype",
    "state_dtype",
    "attention_backend",
    "linear_attention_backend",
    "enforce_eager",
)
#: Used, with one line that says so. The block moves chunk ends, not the cost of N tokens; a drafter
#: adds its own time to a step, a layer's or a few decodes' worth.
SOFT = (
    "block_size",
    "host_threads",
    "speculative_decoding",
    "vllm_version",
    "torch_version",
    "triton_version",
    "cuda_version",
)


def hard_mismatches(table: dict, engine: dict) -> list[str]:
    """Why a table with fingerprint `table` cannot be used for `engine`; empty if it can.

    Compared is what both have: a kernel table says nothing about a model.
    """
    return _differences(HARD, table, engine)


def soft_mismatches(table: dict, engine: dict) -> list[str]:
    """What a reader should know about a table that is used all the same."""
    return _differences(SOFT, table, engine)


def _differences(names: tuple[str, ...], table: dict, engine: dict) -> list[str]:
    return [
        f"{name} is {engine[name]}, the table's is {table[name]}"
        for name in names
        if name in table and name in engine and table[name] != engine[name]
    ]
