"""Flags that describe the chunk rule, and the rule they make."""

import argparse

from chunk_planner.cli.options import count
from chunk_planner.errors import PlannerError
from chunk_planner.rule import SUPPORTED_VERSIONS, ChunkRule

_FIELDS = (
    "block_size",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "long_prefill_token_threshold",
    "draft_slots",
    "vllm_version",
)


def add_rule_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the flags of `rule_from`; not `required` where a model can supply block and budget."""
    add = parser.add_argument
    add("--block-size", type=count, required=required, metavar="TOKENS")
    add("--max-num-batched-tokens", type=count, required=required, metavar="TOKENS")
    add("--max-num-scheduled-tokens", type=count, metavar="TOKENS")
    add("--long-prefill-token-threshold", type=count, default=0, metavar="TOKENS")
    add(
        "--draft-slots",
        type=count,
        metavar="N",
        help="input slots charged per scheduled request (draft_model: 1; default 0, or what "
        "--speculative-config implies)",
    )
    add(
        "--vllm-version",
        help=f"release whose rule applies: {', '.join(SUPPORTED_VERSIONS)} "
        f"(default {SUPPORTED_VERSIONS[-1]}; with MODEL the installed one)",
    )


def rule_from(args: argparse.Namespace, **derived: object) -> ChunkRule:
    """The rule the flags describe; a flag that was not given takes the `derived` value.

    Raises:
        PlannerError: a value out of range, or a token budget above the input budget.
    """
    given = {name: getattr(args, name) for name in _FIELDS if getattr(args, name) is not None}
    rule = ChunkRule(**{**derived, **given})
    if rule.scheduled_budget > rule.max_num_batched_tokens:
        raise PlannerError(
            f"--max-num-scheduled-tokens {rule.scheduled_budget} is above "
            f"--max-num-batched-tokens {rule.max_num_batched_tokens}, all a step can take; "
            "lower it or leave it out"
        )
    return rule
