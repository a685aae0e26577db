"""Rule fields of each speculative method, against the installed engine's own config."""

import pytest

from chunk_planner.errors import PlannerError
from chunk_planner.speculative import rule_fields

METHODS = ["eagle", "eagle3", "mtp", "dflash", "dspark", "draft_model", "ngram"]


@pytest.mark.engine
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("no_drop", [False, True])
@pytest.mark.parametrize("modules", [1, 3])
def test_equals_the_installed_engine(
    method: str, k: int, parallel: bool, no_drop: bool, modules: int
) -> None:
    from types import SimpleNamespace

    import vllm
    from vllm.config import CacheConfig, SpeculativeConfig, VllmConfig

    # Validation wants a draft checkpoint; the properties only read these fields.
    spec = object.__new__(SpeculativeConfig)
    for name, value in {
        "method": method,
        "num_speculative_tokens": k,
        "parallel_drafting": parallel or method in ("dflash", "dspark"),  # vLLM sets it for them
        "disable_eagle_block_drop": no_drop,
        "disable_lookahead_block_hashes": False,
        "draft_model_config": SimpleNamespace(
            hf_config=SimpleNamespace(num_nextn_predict_layers=modules)
        ),
    }.items():
        object.__setattr__(spec, name, value)
    config = object.__new__(VllmConfig)
    object.__setattr__(config, "speculative_config", spec)
    object.__setattr__(config, "kv_transfer_config", None)
    object.__setattr__(config, "cache_config", CacheConfig(enable_prefix_caching=True))
    hash_lookahead = getattr(config, "num_hash_lookahead_tokens", 0)
    assert rule_fields(
        method,
        k,
        vllm.__version__,
        parallel_drafting=parallel,
        disable_eagle_block_drop=no_drop,
        mtp_modules=modules,
    ) == {
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


def test_switches_turn_the_lookahead_hashes_off_in_0_33() -> None:
    fields = ("eagle_block_drop", "hash_lookahead_tokens")
    legacy = rule_fields("mtp", 3, "0.33", disable_lookahead_block_hashes=True)
    assert tuple(legacy[name] for name in fields) == (True, 0)
    kept = rule_fields("mtp", 3, "0.33", disable_eagle_block_drop=True)
    assert tuple(kept[name] for name in fields) == (False, 0)
    assert rule_fields("mtp", 3, "0.33", mtp_modules=2)["hash_lookahead_tokens"] == 3


@pytest.mark.parametrize("method", ["no_such", 5, "MTP"])
def test_a_method_vllm_does_not_have_is_refused(method) -> None:
    with pytest.raises(PlannerError, match="speculative_method = "):
        rule_fields(method, 3, "0.33")


def test_no_method_changes_nothing() -> None:
    assert rule_fields(None, 3, "0.33") == {}
    assert rule_fields("mtp", 0, "0.33") == {}
