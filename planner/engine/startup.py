"""The start-up advice: once per engine when its scheduler is built, checked at the first step."""

import logging
import os

from chunk_planner import advice
from chunk_planner.budget import recommend
from chunk_planner.diagnosis import Finding
from chunk_planner.engine import facts
from chunk_planner.engine.fingerprint import fingerprint
from chunk_planner.engine.live_rule import LiveRule
from chunk_planner.engine.settings import Settings
from chunk_planner.errors import PlannerError
from chunk_planner.recommendation import Constraints, Recommendation
from chunk_planner.score import StepCost
from chunk_planner.tables import Table, find


def at_start(scheduler, logger, guarded) -> None:
    """Warn about `scheduler`'s budget and block, and arm the check at its first step.

    Args:
        scheduler: a vLLM scheduler whose `__init__` has just returned.
        logger: where the warning goes.
        guarded: wraps what runs later inside the engine, so that it cannot raise.
    """
    config = scheduler.vllm_config
    settings = Settings.read(config.additional_config)
    silent = "switched off" if not settings.enabled else facts.why_silent(scheduler)
    if silent:
        logger.debug("Chunk Planner has nothing to say: %s", silent)
        return
    found = advise(scheduler, settings, logger)
    text = advice.warning(found)
    if text and found.checkpoint_us is not None:
        text = f"{text} {advice.checkpoint_price(found)}"
    if text:
        logger.warning("Chunk Planner: %s", text)
    _check_at_first_step(scheduler, logger, guarded)


def advise(scheduler, settings: Settings, logger) -> Recommendation:
    """The recommendation for a live scheduler, with the findings only a live engine shows.

    Step costs come from the table that matches this engine; where there is none, or it does not
    reach the engine's budgets, the answer is rule-only.
    """
    table, checkpoint_us = _measured(scheduler, logger)
    if table is not None:
        try:
            return _recommend(scheduler, settings, table.cost, checkpoint_us)
        except PlannerError as error:
            logger.info("Chunk Planner: %s does not price this engine: %s", table.path, error)
    return _recommend(scheduler, settings, None, checkpoint_us)


def _measured(scheduler, logger) -> tuple[Table | None, float | None]:
    """The engine table that fits, and the price of a checkpoint; None each where there is none.

    What fails here costs the prices, not the advice.
    """
    try:
        engine = fingerprint(scheduler)
        search = find(engine)
        # who named a place for tables wants to know that none was found there
        told = search.table or search.refused or os.environ.get("CHUNK_PLANNER_TABLES")
        level = logging.INFO if told else logging.DEBUG
        logger.log(level, "Chunk Planner: %s", search.text)
        kernels = find(engine, evidence="measured-kernel").table
    except Exception as error:
        logger.info("Chunk Planner: no measured costs: %s: %s", type(error).__name__, error)
        return None, None
    if kernels is None:
        return search.table, None
    try:
        return search.table, kernels.checkpoint_us(facts.checkpoint_bytes(scheduler))
    except PlannerError as error:
        logger.info("Chunk Planner: %s", error)
        return search.table, None


def _recommend(
    scheduler, settings: Settings, cost: StepCost | None, checkpoint_us: float | None
) -> Recommendation:
    config = scheduler.vllm_config
    rule = LiveRule(scheduler)
    most = min(scheduler.max_num_running_reqs, _active(scheduler))
    decodes = settings.expected_decodes
    found = recommend(
        rule,
        max_num_seqs=scheduler.max_num_running_reqs,
        max_num_active_seqs=_active(scheduler),
        num_speculative_tokens=scheduler.num_spec_tokens,
        expected_decodes=None if decodes is None else min(decodes, most),
        short_prompt_tokens=settings.short_prompt_tokens,
        kv_cache_requests=facts.one_block_requests(scheduler),
        cost=cost,
        checkpoint_us=checkpoint_us,
        constraints=Constraints(
            max_model_len=config.model_config.max_model_len,
            lmcache=facts.uses_lmcache(scheduler),
        ),
    )
    return found.with_findings(_live_findings(scheduler))


def _active(scheduler) -> int:
    """`max_num_active_seqs` appeared in 0.31."""
    return getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)


def _live_findings(scheduler) -> list[Finding]:
    found = []
    split, mamba = scheduler.cache_config.block_size, facts.mamba_block(scheduler)
    if split != mamba:
        found.append(Finding("block_mismatch", {"split": split, "mamba": mamba}))
    need = facts.pool_need(scheduler)
    if need.blocks < need.needs:
        found.append(
            Finding(
                "kv_pool_tight",
                {"blocks": need.blocks, "needs": need.needs, "max_model_len": need.max_model_len},
            )
        )
    return found


def _check_at_first_step(scheduler, logger, guarded) -> None:
    """Compare the block the split uses at the first step with the one seen at start-up.

    A multi-process CPU engine up to 0.32 resets it to 128 in between. The check shadows `schedule`
    on the instance and takes itself away, so later steps run the engine's own method untouched.
    """
    at_start_block = scheduler.cache_config.block_size

    @guarded
    def check() -> None:
        now = scheduler.cache_config.block_size
        if now != at_start_block:
            mamba = facts.mamba_block(scheduler)
            logger.warning("Chunk Planner: %s", advice.block_moved(at_start_block, now, mamba))

    engine_schedule, checked = scheduler.schedule, False

    def schedule(*args, **kwargs):
        nonlocal checked
        if not checked:
            checked = True
            # who wrapped this in the meantime, as `calibrate` does, keeps its wrapper
            if vars(scheduler).get("schedule") is schedule:
                del scheduler.schedule
            check()
        return engine_schedule(*args, **kwargs)

    scheduler.schedule = schedule
