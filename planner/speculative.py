"""What a speculative method does to the chunk rule, per vLLM release.

Sources: `SpeculativeConfig.max_num_new_slots_for_drafting` and `.use_eagle_block_drop`
(`vllm/config/speculative.py`), `VllmConfig.num_prefill_lookahead_tokens` and
`.num_hash_lookahead_tokens` (`vllm/config/vllm.py`).
"""

from chunk_planner.rule import Release, find_release

#: Methods whose drafter reads the target model's hidden states.
_EAGLE = frozenset({"eagle", "eagle3", "mtp"})
_PARALLEL = frozenset({"dflash", "dspark"})


def rule_fields(
    method: str | None,
    num_speculative_tokens: int,
    vllm_version: str,
    *,
    parallel_drafting: bool = False,
    kv_connector: bool = False,
) -> dict[str, object]:
    """Fields of `ChunkRule` that follow from `--speculative-config`.

    Args:
        method: as in `--speculative-config`; None where it is not known: then only the decode
            tokens count, and no field follows.
        num_speculative_tokens: k.
        kv_connector: a KV connector is configured; block hashes then do not look ahead.
    """
    if method is None or not num_speculative_tokens:
        return {}
    release = find_release(vllm_version)
    # vLLM folds every model's own name for it (deepseek_mtp, qwen3_next_mtp, ...) into "mtp".
    method = "mtp" if method.endswith("_mtp") else method
    reads_hidden = method in _EAGLE | _PARALLEL
    looks_ahead = release.has_hash_lookahead and method in _EAGLE and not kv_connector
    drops = method in _EAGLE if release.has_hash_lookahead else reads_hidden
    return {
        "draft_slots": _draft_slots(method, num_speculative_tokens, release, parallel_drafting),
        "prefill_lookahead_tokens": int(reads_hidden),
        "hash_lookahead_tokens": int(looks_ahead),
        "eagle_block_drop": drops and not looks_ahead,
    }


def _draft_slots(method: str, k: int, release: Release, parallel: bool) -> int:
    if method in _PARALLEL and release.has_hash_lookahead:
        # From 0.33 on they draft in a pass of their own and cap the active sequences instead.
        return 0
    if method == "dflash":
        return k
    if method == "draft_model":
        return k if parallel else 1
    # vLLM sets parallel_drafting for DSpark itself.
    return k - 1 if parallel or method == "dspark" else 0
