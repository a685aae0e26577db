"""Why budget is left over: one reason for each idle token.

After a step, `left` tokens are unspent. The prefills are visited in scheduler order, running then
waiting, tried or not; each is charged `min(what its prefill still lacks, left)` under the first
limit that held it, and `left` shrinks by that. What remains, nobody could have used: `no_work`,
which is not idle. So charges and `no_work` always add up to `left`.
"""

from typing import Literal, get_args

from chunk_planner.rule import Rule

IdleReason = Literal[
    "seq_limit",  # waiting, and no sequence slot is free
    "threshold",  # capped by long_prefill_token_threshold
    "starved",  # running, and the split gave it nothing
    "head_of_line",  # waiting, and the split gave it, or one ahead of it, nothing
    "saw_tooth",  # it began inside a block and stopped at the next boundary
    "checkpoint_stop",  # stopped at the last boundary, the prompt's tail or a shared prefix's end
    "lookahead",  # cut back for the prompt tokens that the drafter reads ahead
    "align_floor",  # cut back to a block boundary
]
IDLE_REASONS: tuple[IdleReason, ...] = get_args(IdleReason)


def cut_reason(
    rule: Rule,
    start: int,
    wanted: int,
    split: int,
    got: int,
    num_prompt_tokens: int,
    shared_prefix_boundary: int = 0,
) -> IdleReason:
    """What ended a chunk early that the budgets and the threshold let have `wanted` tokens.

    Told from the numbers alone, so that it holds for any rule.

    Args:
        split: what the split made of `wanted`, at least 1.
        got: what the lookahead reserve made of that, possibly 0.
    """
    if got == 0:
        return "lookahead"
    block = rule.block_size
    end, offered = start + split, start + wanted
    if split < wanted:
        if start % block and end == start - start % block + block:
            return "saw_tooth"
        # Far from every place where a state must be kept, a shorter chunk is a coarser grid.
        stops_near = shared_prefix_boundary > start or num_prompt_tokens - end <= 2 * block
        floored = offered < num_prompt_tokens and (
            end == offered - offered % block or (end % block == 0 and not stops_near)
        )
        if not floored:
            return "checkpoint_stop"
    return "lookahead" if got < split else "align_floor"
