"""Flags that describe the chunk rule, and the rule they make."""

import argparse

from chunk_planner.cli.options import count
from chunk_planner.rule import SUPPORTED_VERSIONS, ChunkRule


def add_rule_arguments(parser: argparse.ArgumentParser, *, need_block: bool = True) -> None:
    add = parser.add_argument
    add("--block-size", type=count, required=need_block, metavar="TOKENS")
    add("--max-num-batched-tokens", type=count, required=need_block, metavar="TOKENS")
    add("--max-num-scheduled-tokens", type=count, metavar="TOKENS")
    add("--long-prefill-token-threshold", type=count, default=0, metavar="TOKENS")
    add(
        "--draft-slots",
        type=count,
        default=0,
        metavar="N",
        help="draft slots per request (draft_model: 1)",
    )
    add(
        "--vllm-version",
        default=SUPPORTED_VERSIONS[-1],
        help=f"release whose rule applies: {', '.join(SUPPORTED_VERSIONS)}",
    )


def rule_from(args: argparse.Namespace, **changes: object) -> ChunkRule:
    """The rule the flags describe. Raises PlannerError for a value out of range."""
    fields = {
        name: getattr(args, name)
        for name in (
            "block_size",
            "max_num_batched_tokens",
            "max_num_scheduled_tokens",
            "long_prefill_token_threshold",
            "draft_slots",
            "vllm_version",
        )
    }
    return ChunkRule(**{**fields, **changes})
