"""What the plugin says of a live scheduler, and when it stays silent.

The schedulers are vLLM's own, built without a model; `test_plugin_server.py` has the whole server.
"""

import logging
import os

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")
from real_scheduler import build_scheduler  # noqa: E402

from chunk_planner.engine import facts, plugin  # noqa: E402
from chunk_planner.engine.startup import at_start  # noqa: E402
from chunk_planner.errors import PlannerError  # noqa: E402

BLOCK = 1152


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture):
    """Run the start-up advice on a scheduler; the warnings it logged."""
    logger = logging.getLogger("chunk_planner.tests")

    def run(scheduler) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger=logger.name):
            at_start(scheduler, logger, plugin.guarded)
        return [record.getMessage() for record in caplog.records]

    run.messages = lambda: [record.getMessage() for record in caplog.records]
    return run


def scheduler(budget: int = 2048, **options):
    return build_scheduler(block_size=BLOCK, max_num_batched_tokens=budget, **options)


def test_warns_with_the_numbers_of_the_engine(said):
    (text,) = said(scheduler(max_num_seqs=16))
    assert "1152 of 2048 tokens" in text
    assert "44 %" in text
    assert "--max-num-batched-tokens 2880" in text
    assert "D = 16" in text


def test_the_suggested_budget_and_the_large_default_are_silent(said):
    assert said(scheduler(2880, max_num_seqs=16)) == []
    assert said(scheduler(8192)) == []


def test_the_budget_that_counts_is_the_schedulers(said):
    (text,) = said(scheduler(4096, max_num_scheduled_tokens=2048))
    assert "--max-num-scheduled-tokens" in text


def test_a_small_pool_bounds_the_decodes(said):
    # one attention and two state blocks a request: 30 blocks less the null block hold nine
    small = scheduler(max_num_seqs=64, num_blocks=30)
    small.max_model_len = small.vllm_config.model_config.max_model_len = 20480
    assert facts.one_block_requests(small) == 9
    (text,) = said(small)
    assert "D = 9" in text


def test_a_pool_of_one_longest_request_is_told_so(said):
    # 20480 tokens are 18 blocks, plus 2 state blocks and the null block
    for blocks, tight in ((20, True), (21, False)):
        engine = scheduler(8192, num_blocks=blocks)
        engine.max_model_len = engine.vllm_config.model_config.max_model_len = 20480
        found = said(engine)
        assert bool(found) == tight
        assert not tight or "needs 21" in found[0]


def test_a_hanging_budget_is_told_with_its_reason(said):
    (text,) = said(
        scheduler(BLOCK, drafter="draft_model", num_speculative_tokens=2, max_num_seqs=4)
    )
    assert "hangs" in text
    assert "--max-num-batched-tokens" in text


def test_both_blocks_are_named_where_they_differ(said):
    engine = scheduler(8192)
    engine.cache_config.block_size = 128
    (text,) = said(engine)
    assert "128-token" in text
    assert "1152" in text


def test_a_block_that_moves_before_the_first_step_is_noticed_once(said):
    engine = scheduler(8192)
    assert said(engine) == []
    engine.cache_config.block_size = 128
    engine.schedule()
    engine.schedule()
    (text,) = said.messages()
    assert "128-token blocks" in text
    assert "--block-size 1152" in text


def test_after_the_first_step_the_engines_own_method_runs(said):
    engine = scheduler(8192)
    said(engine)
    assert "schedule" in vars(engine)
    engine.schedule()
    assert "schedule" not in vars(engine)
    assert said.messages() == []


def test_who_wraps_schedule_before_the_first_step_keeps_its_wrapper(said):
    """As `calibrate` does to see what each step holds."""
    engine = scheduler(8192)
    said(engine)
    inner, seen = engine.schedule, []

    def recording():
        seen.append(len(seen))
        return inner()

    engine.schedule = recording
    engine.cache_config.block_size = 128
    for _ in range(3):
        engine.schedule()
    assert seen == [0, 1, 2]
    assert len(said.messages()) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: setattr(s, "need_mamba_block_aligned_split", False), "align"),
        (lambda s: setattr(s.cache_config, "enable_prefix_caching", False), "prefix caching"),
        (lambda s: setattr(s.vllm_config.model_config, "runner_type", "pooling"), "pooling"),
        (lambda s: setattr(s.vllm_config.parallel_config, "data_parallel_rank_local", 1), "rank"),
        (lambda s: setattr(s, "max_model_len", 2048), "one step"),
        (
            lambda s: setattr(
                s.vllm_config, "additional_config", {"chunk_planner": {"enabled": 0}}
            ),
            None,
        ),
    ],
    ids=["full-attention", "no-caching", "pooling", "second-rank", "short-context", "disabled"],
)
def test_silent_where_it_has_no_say(said, change, why):
    engine = scheduler()
    change(engine)
    assert said(engine) == []
    assert why is None or why in facts.why_silent(engine)


def test_silent_on_a_decode_node(said):
    from types import SimpleNamespace

    engine = scheduler()
    engine.vllm_config.kv_transfer_config = SimpleNamespace(
        kv_role="kv_consumer", kv_connector="NixlConnector"
    )
    assert said(engine) == []


@pytest.mark.parametrize("named", [True, False])
def test_a_place_for_tables_that_has_none_is_told(named, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("CHUNK_PLANNER_TABLES", raising=False)
    if named:
        monkeypatch.setenv("CHUNK_PLANNER_TABLES", str(tmp_path / "typo"))
    logger = logging.getLogger("chunk_planner.tests")
    engine = scheduler()
    engine.vllm_config.parallel_config.world_size = 1
    with caplog.at_level(logging.INFO, logger=logger.name):
        at_start(engine, logger, plugin.guarded)
    assert (f"no tuning table in {tmp_path / 'typo'}" in caplog.text) == named


def test_the_fingerprint_has_the_ranks_that_wait_for_each_other_and_the_drafter():
    from chunk_planner.engine.fingerprint import fingerprint

    engine = scheduler(drafter="mtp", num_speculative_tokens=3)
    parallel = engine.vllm_config.parallel_config
    parallel.world_size, parallel.data_parallel_size = 4, 2
    found = fingerprint(engine)
    assert found["device_count"] == 8
    assert found["speculative_decoding"] == "mtp 3"


@pytest.mark.parametrize(("value", "threads"), [("4", 4), ("4,2", 4), ("", os.cpu_count())])
def test_the_fingerprint_counts_the_outer_openmp_threads(value, threads, monkeypatch):
    from chunk_planner.engine.fingerprint import fingerprint

    monkeypatch.setenv("OMP_NUM_THREADS", value)
    engine = scheduler()
    engine.vllm_config.parallel_config.world_size = 1
    assert fingerprint(engine)["host_threads"] == threads


@pytest.mark.parametrize(
    "chosen",
    [
        {"gdn_prefill_backend": "triton"},
        {"kda_prefill_backend": "triton"},
        {"kda_prefill_backend": "flashkda"},
        {"kda_decode_backend": "native"},
    ],
)
def test_the_fingerprint_names_every_linear_attention_backend(chosen):
    from chunk_planner.engine.fingerprint import fingerprint

    engine = scheduler()
    engine.vllm_config.parallel_config.world_size = 1
    default = fingerprint(engine)["linear_attention_backend"]
    engine.vllm_config.additional_config = chosen
    ((name, value),) = chosen.items()
    assert fingerprint(engine)["linear_attention_backend"] == f"{name}={value}" != default
    engine.vllm_config.additional_config = {name: "auto"}
    assert fingerprint(engine)["linear_attention_backend"] == default


def test_lmcache_gets_its_own_range(said):
    from types import SimpleNamespace

    engine = scheduler(4096)
    engine.vllm_config.kv_transfer_config = SimpleNamespace(
        kv_role="kv_both", kv_connector="LMCacheConnectorV1"
    )
    (text,) = said(engine)
    assert "LMCache" in text
    assert "--max-num-batched-tokens 2303" in text


def test_options_come_from_the_engines_config_and_the_environment_wins(said, monkeypatch):
    engine = scheduler(max_num_seqs=64)
    engine.vllm_config.additional_config = {"chunk_planner": {"expected_decodes": 8}}
    assert "D = 8 " in said(engine)[0]
    monkeypatch.setenv("CHUNK_PLANNER_EXPECTED_DECODES", "4")
    assert "D = 4 " in said(engine)[0]
    monkeypatch.setenv("CHUNK_PLANNER_EXPECTED_DECODES", "many")
    with pytest.raises(PlannerError, match="expected_decodes = 'many'"):
        said(engine)


def test_the_hook_installs_once_and_swallows_failures(monkeypatch, caplog):
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.__init__
    monkeypatch.setattr(plugin, "_failed", False)
    monkeypatch.setattr(Scheduler, "__init__", getattr(original, "__wrapped__", original))
    monkeypatch.setenv("CHUNK_PLANNER_EXPECTED_DECODES", "many")
    logger = logging.getLogger(plugin.LOGGER_NAME)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    plugin.register()
    hooked = Scheduler.__init__
    plugin.register()
    assert Scheduler.__init__ is hooked
    with caplog.at_level(logging.WARNING, logger=logger.name):
        scheduler()
        scheduler()
    lines = [r.getMessage() for r in caplog.records if "steps aside" in r.getMessage()]
    assert len(lines) == 1
    assert "expected_decodes = 'many'" in lines[0]


def test_switched_off_it_hooks_nothing(monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    original = getattr(Scheduler.__init__, "__wrapped__", Scheduler.__init__)
    monkeypatch.setattr(Scheduler, "__init__", original)
    monkeypatch.setenv("CHUNK_PLANNER", "0")
    plugin.register()
    assert Scheduler.__init__ is original
