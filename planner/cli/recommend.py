"""`chunk-planner recommend`: the budget to set instead, and the price of the alternatives."""

import argparse

from chunk_planner import advice
from chunk_planner.budget import Constraints, Recommendation, recommend
from chunk_planner.cli.options import add_json, count
from chunk_planner.cli.render import print_json, print_table
from chunk_planner.cli.rule_options import add_rule_arguments, rule_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rule_arguments(parser)
    add = parser.add_argument
    add("--max-num-seqs", type=count, default=256, metavar="N")
    add("--num-speculative-tokens", type=count, default=0, metavar="K")
    add("--expected-decodes", type=count, metavar="N", help="decoding requests that share a step")
    add("--short-prompt-tokens", type=count, metavar="TOKENS", help="room kept for a short prompt")
    add("--prompt-tokens", type=count, metavar="TOKENS", help="a typical long prompt")
    add("--max-model-len", type=count, metavar="TOKENS")
    add("--lmcache", action="store_true", help="the engine runs with LMCache")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    found = recommend(
        rule_from(args),
        max_num_seqs=args.max_num_seqs,
        num_speculative_tokens=args.num_speculative_tokens,
        expected_decodes=args.expected_decodes,
        short_prompt_tokens=args.short_prompt_tokens,
        prompt_tokens=args.prompt_tokens,
        constraints=Constraints(max_model_len=args.max_model_len, lmcache=args.lmcache),
    )
    if args.json:
        print_json({**found.to_json(), "reasons": advice.reasons(found)})
        return
    print_candidates(found)
    for reason in advice.reasons(found):
        print(f"\n{reason}")


def print_candidates(found: Recommendation) -> None:
    """The budgets side by side, the current one and the recommended one marked."""
    best = found.recommended.max_num_batched_tokens
    rows = []
    shown = {c.max_num_batched_tokens: c for c in (*found.candidates, found.current)}
    for budget in sorted(shown):
        one = shown[budget]
        mark = "now" if budget == found.current.max_num_batched_tokens else ""
        if budget == best:
            mark = "keep" if mark else "set"
        rows.append(
            [
                mark,
                budget,
                one.blocks,
                advice.tokens(one.tokens_per_step),
                advice.percent(one.idle_share),
                one.decodes,
                advice.percent(one.idle_share_with_decodes),
                one.short_prompt_wait_steps,
                one.checkpoint_spacing_tokens,
            ]
        )
    print_table(
        [
            "",
            "budget",
            "blocks",
            "tokens/step",
            "idle alone",
            "D",
            "idle with D decodes",
            "short prompt waits (steps)",
            "checkpoint every (tokens)",
        ],
        rows,
        title=f"block {found.rule.block_size} tokens, evidence: {found.evidence}",
    )
