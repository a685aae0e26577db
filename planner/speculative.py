"""What a speculative method does to the chunk rule, per vLLM release.

Sources: `SpeculativeConfig.max_num_new_slots_for_drafting` and `.use_eagle_block_drop`
(`vllm/config/speculative.py`), `VllmConfig.num_prefill_lookahead_tokens` and
`.num_hash_lookahead_tokens` (`vllm/config/vllm.py`).
"""

from chunk_planner.errors import PlannerError
from chunk_planner.rule import Release, find_release

#: Methods whose drafter reads the target model's hidden states.
_EAGLE = frozenset({"eagle", "eagle3", "mtp"})
_PARALLEL = frozenset({"dflash", "dspark"})
#: Methods that are neither; the rule knows them by their draft slots.
_OTHERS = frozenset(
    {
        "ngram",
        "ngram_gpu",
        "medusa",
        "mlp_speculator",
        "draft_model",
        "suffix",
        "custom_class",
        "extract_hidden_states",
    }
)


def find_method(method: str) -> str:
    """`method` of `--speculative-config` under the name vLLM works with.

    Raises:
        PlannerError: vLLM has no such method.
    """
    known = _EAGLE | _PARALLEL | _OTHERS
    if isinstance(method, str) and method.endswith("_mtp"):
        return "mtp"  # as vLLM folds every model's own name for it (qwen3_next_mtp, ...)
    if not isinstance(method, str) or method not in known:
        raise PlannerError(
            f"speculative_method = {method!r} is not one of {', '.join(sorted(known))}"
        )
    return method


def rule_fields(
    method: str | None,
    num_speculative_tokens: int,
    vllm_version: str,
    *,
    parallel_drafting: bool = False,
    disable_eagle_block_drop: bool = False,
    disable_lookahead_block_hashes: bool = False,
    mtp_modules: int = 1,
    kv_connector: bool = False,
) -> dict[str, object]:
    """Fields of `ChunkRule` that follow from `--speculative-config`.

    Args:
        method: as in `--speculative-config`; None where it is not known: then only the decode
            tokens count, and no field follows.
        num_speculative_tokens: k.
        parallel_drafting, disable_eagle_block_drop, disable_lookahead_block_hashes: as in
            `--speculative-config`.
        mtp_modules: the model's `num_nextn_predict_layers`; with more than one, MTP reads k
            tokens ahead instead of one.
        kv_connector: a KV connector is configured; block hashes then do not look ahead.
    """
    if method is None or not num_speculative_tokens:
        return {}
    release = find_release(vllm_version)
    method = find_method(method)
    reads_hidden = method in _EAGLE | _PARALLEL
    drops = method in _EAGLE if release.has_hash_lookahead else reads_hidden
    drops = drops and not disable_eagle_block_drop
    looks_ahead = release.has_hash_lookahead and drops
    looks_ahead = looks_ahead and not (kv_connector or disable_lookahead_block_hashes)
    lookahead = int(reads_hidden)
    if method == "mtp" and min(mtp_modules, num_speculative_tokens) > 1:
        lookahead = num_speculative_tokens  # each module reads a token further than the last
    return {
        "draft_slots": _draft_slots(method, num_speculative_tokens, release, parallel_drafting),
        "prefill_lookahead_tokens": lookahead,
        "hash_lookahead_tokens": lookahead if looks_ahead else 0,
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
