"""Every sentence a person reads about a budget: the warning, the reasons, the refusals.

Each number is given with its unit and with where it came from: `rule` (vLLM's chunk rule alone),
`measured-engine` (whole steps timed on the device the table names), `modelled`.
"""

from chunk_planner.diagnosis import Finding
from chunk_planner.evaluate import Budget
from chunk_planner.recommendation import Recommendation


def percent(share: float) -> str:
    """A share as whole percent: 0.4375 -> '44 %'."""
    return f"{100 * share:.0f} %"


def tokens(number: float) -> str:
    """A token count, with decimals only where it is a mean."""
    return f"{number:.0f}" if float(number).is_integer() else f"{number:.1f}"


def flags(recommendation: Recommendation, budget: Budget) -> str:
    """The vLLM flags that set `budget`, ready to paste.

    Both are named where the user set both: the scheduler uses the smaller, so raising one does
    nothing.
    """
    text = f"--max-num-batched-tokens {budget.max_num_batched_tokens}"
    rule = recommendation.rule
    if rule.scheduled_budget != rule.max_num_batched_tokens:
        text += f" --max-num-scheduled-tokens {budget.max_num_scheduled_tokens}"
    return text


def warning(recommendation: Recommendation) -> str | None:
    """The start-up warning, one line; None where there is nothing to warn about."""
    if not recommendation.findings:
        return None
    # The engine that speaks here runs on the device its table was matched with.
    lead = " ".join(
        _finding(finding, recommendation, " on this device") for finding in recommendation.findings
    )
    mended = any(finding.mended_by_budget for finding in recommendation.findings)
    parts = [lead]
    if mended and not recommendation.keeps:
        parts.append(_suggestion(recommendation))
    elif mended:
        parts.append("No larger budget mends this within the limits of this engine.")
    parts += [_note(note, recommendation) for note in recommendation.notes]
    return " ".join(parts)


def reasons(recommendation: Recommendation) -> list[str]:
    """Why `recommended` was chosen, one sentence each, for people and for JSON."""
    said = [_finding(finding, recommendation) for finding in recommendation.findings]
    if recommendation.keeps:
        said.append(_keep(recommendation))
    else:
        said.append(_suggestion(recommendation))
    said += [_note(note, recommendation) for note in recommendation.notes]
    said += _kv_left(recommendation)
    if not recommendation.lmcache:  # which takes no budget of two blocks
        said.append(_second_prefill(recommendation))
    if recommendation.checkpoint_us is not None:
        said.append(checkpoint_price(recommendation))
    if recommendation.evidence == "rule":
        said.append(
            "This is rule-only: it follows from vLLM's chunk rule, no step was timed. Whether "
            "idle tokens cost time here is answered by 'chunk-planner calibrate'."
        )
    return said


def block_moved(at_start: int, now: int, mamba: int) -> str:
    """Said at the first scheduled step if the split's block is no longer what start-up showed."""
    return (
        f"the scheduler now splits prefill on {now}-token blocks; it was built with {at_start}, "
        f"and the recurrent state is cached every {mamba} tokens. Advice given at start-up holds "
        f"for {at_start}. Pass --block-size {mamba} to pin it."
    )


def _finding(finding: Finding, recommendation: Recommendation, measured_where: str = "") -> str:
    rule, now = recommendation.rule, recommendation.current
    block, values = rule.block_size, finding.values
    budget = now.max_num_batched_tokens
    spends = f"{tokens(now.tokens_per_step)} of {now.max_num_scheduled_tokens} tokens"
    if finding.kind == "idle":
        text = (
            f"Prefill steps use {spends}: in mamba_cache_mode=align a chunk ends on a block "
            f"boundary and a block is {block} tokens, so {percent(now.idle_share)} of the budget "
            "is idle for a long prompt (rule)."
        )
        return text + _ignored_threshold(recommendation)
    if finding.kind == "saw_tooth":
        text = (
            f"A block ({block} tokens) is larger than the budget ({now.max_num_scheduled_tokens}): "
            "chunks run to each boundary and start again, a saw-tooth of "
            f"{tokens(now.tokens_per_step)} tokens a step on average, so "
            f"{percent(now.idle_share)} of the budget is idle for a long prompt (rule)."
        )
        return text + _ignored_threshold(recommendation)
    if finding.kind == "small_threshold":
        return (
            f"--long-prefill-token-threshold {rule.long_prefill_token_threshold} is below a block "
            f"({block} tokens), so a block takes several steps of {tokens(now.tokens_per_step)} "
            f"tokens on average and {percent(now.idle_share)} of the budget is idle for a long "
            f"prompt (rule). Set it to a multiple of {block}, or leave it out."
        )
    if finding.kind == "slowdown":
        best = min(
            (c for c in recommendation.candidates if c.slowdown is not None),
            key=lambda c: c.slowdown,
            default=recommendation.recommended,
        )
        return (
            f"Prefill steps of {tokens(now.tokens_per_step)} tokens (budget {budget}, block "
            f"{block}): {1 + values['slowdown']:.2f}x slower per token than steps of "
            f"{tokens(best.tokens_per_step)} ({recommendation.evidence}{measured_where})."
        )
    if finding.kind == "no_headroom":
        above = values["above"]
        when = "any decode" if above == 0 else f"more than {above} decoding requests"
        stops = "stops" if above == 0 else "stop"
        return (
            f"With budget {budget} and {block}-token blocks, {when} in a step {stops} prefill "
            "until they finish: no whole block fits beside them (rule; up to "
            f"{recommendation.workload.most_decodes} requests can decode at once)."
        )
    if finding.kind == "stalled":
        return (
            f"With budget {budget} and {block}-token blocks prefill hangs: {values['why']} (rule)."
        )
    if finding.kind == "lmcache":
        return (
            f"LMCache caches a hybrid model's state only if a step holds exactly one block: "
            f"{values['least']} <= --max-num-batched-tokens <= {values['most']}; it is {budget} "
            "(rule)."
        )
    if finding.kind == "block_mismatch":
        return (
            f"The scheduler splits prefill on {values['split']}-token blocks, but recurrent state "
            f"is cached every {values['mamba']} tokens: chunk ends miss the positions whose state "
            "can be cached, and prefix caching may find nothing (rule)."
        )
    if finding.kind == "kv_pool_tight":
        return (
            f"The KV cache holds {values['blocks']} blocks and one request of "
            f"--max-model-len {values['max_model_len']} needs {values['needs']} (state, lookahead "
            "and null blocks included): such a request is never scheduled to its end (rule). Lower "
            "--max-model-len, or leave the cache more memory."
        )
    raise KeyError(finding.kind)


def _ignored_threshold(recommendation: Recommendation) -> str:
    rule = recommendation.rule
    if rule.long_prefill_token_threshold < rule.block_size:
        return ""
    return (
        f" --long-prefill-token-threshold {rule.long_prefill_token_threshold} does not change "
        f"this: vLLM {rule.release.version} ignores it for a request that is alone."
    )


def _suggestion(recommendation: Recommendation) -> str:
    best = recommendation.recommended
    decodes = "decode" if best.decodes == 1 else "decodes"
    text = (
        f"Set {flags(recommendation, best)}: {best.blocks} x {recommendation.rule.block_size} + "
        f"{best.headroom_tokens} for D = {best.decodes} {decodes} sharing a step + "
        f"{best.lane_tokens} for a short prompt beside them{_rounded(recommendation)}; "
        f"{tokens(best.tokens_per_step)} tokens "
        f"a step, {percent(best.idle_share)} idle alone"
    )
    if best.slowdown is None:
        return text + " (rule)." + _stall_limit(recommendation)
    text += f", {1 + best.slowdown:.2f}x the best time per token"
    if best.mixed_step_ms is not None:
        text += f", {best.mixed_step_ms:.0f} ms for a step that decodes share"
    return text + f" ({recommendation.evidence})." + _stall_limit(recommendation)


def _rounded(recommendation: Recommendation) -> str:
    best, block = recommendation.recommended, recommendation.rule.block_size
    parts = best.blocks * block + best.headroom_tokens + best.lane_tokens
    return ", rounded up" if parts < best.max_num_batched_tokens else ""


def _stall_limit(recommendation: Recommendation) -> str:
    best = recommendation.recommended
    most = recommendation.workload.most_decodes
    if best.stalls_above_decodes is None or best.stalls_above_decodes >= most:
        return ""
    return (
        f" Prefill waits while more than {best.stalls_above_decodes} requests decode at once; "
        f"--max-num-seqs allows {most}."
    )


def _keep(recommendation: Recommendation) -> str:
    now = recommendation.current
    text = (
        f"Keep {flags(recommendation, now)}: {tokens(now.tokens_per_step)} tokens a step, "
        f"{percent(now.idle_share)} idle alone"
    )
    if now.slowdown is not None:
        return (
            text + f", {1 + now.slowdown:.2f}x the best time per token ({recommendation.evidence})."
        )
    return text + " (rule)."


def _second_prefill(recommendation: Recommendation) -> str:
    cap = recommendation.recommended.second_prefill
    return (
        "A larger budget does not let a second long prompt in beside the first: that takes "
        f"--long-prefill-token-threshold {cap['long_prefill_token_threshold']} with "
        f"--max-num-batched-tokens {cap['max_num_batched_tokens']} (rule)."
    )


def checkpoint_price(recommendation: Recommendation) -> str:
    """What storing the recurrent state at a chunk end costs by itself."""
    text = f"Storing the state at a chunk end takes {recommendation.checkpoint_us:.0f} us"
    step = recommendation.recommended.mixed_step_ms
    if step is not None:
        share = recommendation.checkpoint_us / 1e3 / step
        text += f", {100 * share:.2f} % of a step"
    return text + " (measured-kernel); what costs is that the chunk has to end there."


def _kv_left(recommendation: Recommendation) -> list[str]:
    """Which of the shown budgets still hold the longest request, where memory is known."""
    shown = [recommendation.current, *recommendation.candidates]
    known = {one.max_num_batched_tokens: one for one in shown if one.kv_tokens is not None}
    if not known:
        return []
    length = recommendation.max_model_len
    lost = [str(tokens) for tokens in sorted(known) if not known[tokens].kv_fits]
    if not lost:
        return [f"Every budget shown leaves room for a request of {length} tokens (modelled)."]
    return [f"No room for a request of {length} tokens is left at {', '.join(lost)} (modelled)."]


def _note(note: Finding, recommendation: Recommendation) -> str:
    if note.kind == "still_on_slope":
        return (
            f"Time per token still falls at the largest measured budget, {note.values['tokens']}: "
            "measure further with 'chunk-planner calibrate --max-num-batched-tokens' above it."
        )
    if note.kind == "no_larger_budget":
        return "No other budget schedules more tokens a step within the given limits."
    if note.kind == "prompts_below_block":
        return (
            f"Prompts of {note.values['prompt_tokens']} tokens are no longer than a block: their "
            "length, not the block grid, decides what a step holds."
        )
    if note.kind == "prompts_fit_a_step":
        return (
            f"No prompt is longer than a step (--max-model-len {note.values['max_model_len']} "
            "tokens), so the block grid leaves budget idle only at a prompt's last stop (rule)."
        )
    raise KeyError(note.kind)
