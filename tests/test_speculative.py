"""Rule fields of each speculative method, against the installed engine's own config."""

import pytest

from chunk_planner.speculative import rule_fields

METHODS = ["eagle", "eagle3", "mtp", "dflash", "dspark", "draft_model", "ngram"]


@pytest.mark.engine
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("parallel", [False, True])
def test_equals_the_installed_engine(method: str, k: int, parallel: bool) -> None:
    import vllm
    from vllm.config import CacheConfig, SpeculativeConfig, VllmConfig

    # Validation wants a draft checkpoint; the properties only read these fields.
    spec = object.__new__(SpeculativeConfig)
    for name, value in {
        "method": method,
        "num_speculative_tokens": k,
        "parallel_drafting": parallel or method in ("dflash", "dspark"),  # vLLM sets it for them
        "disable_eagle_block_drop": False,
        "disable_lookahead_block_hashes": False,
        "draft_model_config": None,
    }.items():
        object.__setattr__(spec, name, value)
    config = object.__new__(VllmConfig)
    object.__setattr__(config, "speculative_config", spec)
    object.__setattr__(config, "kv_transfer_config", None)
    object.__setattr__(config, "cache_config", CacheConfig(enable_prefix_caching=True))
    hash_lookahead = getattr(config, "num_hash_lookahead_tokens", 0)
    assert rule_fields(method, k, vllm.__version__, parallel_drafting=parallel) == {
        "draft_slots": spec.max_num_new_slots_for_drafting,
        "prefill_lookahead_tokens": config.num_prefill_lookahead_tokens,
        "hash_lookahead_tokens": hash_lookahead,
        "eagle_block_drop": spec.use_eagle_block_drop() and not hash_lookahead,
    }


def test_lookahead_hashes_replace_the_block_drop_in_0_33() -> None:
    assert rule_fields("mtp", 3, "0.32")["eagle_block_drop"]
    plain = rule_fields("mtp", 3, "0.33")
    assert (plain["eagle_block_drop"], plain["hash_lookahead_tokens"]) == (False, 1)
    connected = rule_fields("mtp", 3, "0.33", kv_connector=True)
    assert (connected["eagle_block_drop"], connected["hash_lookahead_tokens"]) == (True, 0)


def test_an_unknown_method_changes_nothing() -> None:
    assert rule_fields(None, 3, "0.33") == {}
    assert rule_fields("mtp", 0, "0.33") == {}
