"""`chunk-planner plan`: the chunks, steps and idle tokens of one prompt."""

import argparse
from itertools import groupby

from chunk_planner.cli.options import add_json, count
from chunk_planner.cli.render import print_json
from chunk_planner.cli.rule_options import add_rule_arguments, rule_from
from chunk_planner.plan import ChunkPlan, plan_prefill


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rule_arguments(parser)
    add = parser.add_argument
    add("--prompt-tokens", type=count, required=True, metavar="TOKENS")
    add("--computed-tokens", type=count, default=0, metavar="TOKENS", help="prefix cache hit")
    add(
        "--decode-tokens",
        type=count,
        default=0,
        metavar="TOKENS",
        help="decode tokens in each step",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    rule = rule_from(args)
    plan = plan_prefill(
        rule, args.prompt_tokens, args.computed_tokens, decode_tokens=args.decode_tokens
    )
    if args.json:
        print_json(
            {
                "chunks": list(plan.chunks),
                "steps": plan.steps,
                "tokens_per_step": plan.tokens_per_step,
                "idle_share": plan.idle_share,
                "idle_share_with_decodes": plan.idle_share_with_decodes,
                "idle_tokens": plan.idle_tokens,
                "checkpoints": list(plan.checkpoints),
                "stalled": plan.stalled,
                "vllm_version": rule.vllm_version,
            }
        )
        return
    print(_text(plan, rule.scheduled_budget, rule.vllm_version))


def _text(plan: ChunkPlan, budget: int, version: str) -> str:
    runs = [(size, len(list(same))) for size, same in groupby(plan.chunks)]
    shown = [f"{size}" + (f" x {times}" if times > 1 else "") for size, times in runs]
    if len(shown) > 12:
        shown = [*shown[:8], f"... {len(shown) - 10} more runs ...", *shown[-2:]]
    lines = [
        f"vLLM {version}, rule:",
        f"  chunks           {', '.join(shown) or 'none'}",
        f"  steps            {plan.steps}",
        f"  tokens per step  {plan.tokens_per_step:.0f} of {budget} (long prompt)",
        f"  idle share       {100 * plan.idle_share:.1f} % alone, "
        f"{100 * plan.idle_share_with_decodes:.1f} % with these decodes",
    ]
    if plan.idle_tokens:
        idle = ", ".join(f"{tokens} {reason}" for reason, tokens in plan.idle_tokens.items())
        lines.append(f"  idle tokens      {idle}")
    if plan.stalled:
        lines.append(f"  stalled          {plan.stalled}")
    return "\n".join(lines)
