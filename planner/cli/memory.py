"""`chunk-planner memory`: the KV cache left at each budget, before the first start."""

import argparse

from chunk_planner.cli.model_options import (
    add_memory_arguments,
    add_model_arguments,
    add_usage_context,
    default_budget_from,
    memory_from,
    settings_from,
)
from chunk_planner.cli.options import add_json, count
from chunk_planner.cli.render import print_json, print_table
from chunk_planner.geometry import kv_left, resolve
from chunk_planner.geometry.memory import GIB


def counts(text: str) -> list[int]:
    """Comma separated token counts: `2048,4096,8k`."""
    return [count(part) for part in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_memory_arguments(parser)
    parser.add_argument(
        "--max-num-batched-tokens",
        type=counts,
        metavar="TOKENS[,TOKENS...]",
        help="default: what vLLM picks for this memory and usage context",
    )
    parser.add_argument("--max-num-seqs", type=count, metavar="N")
    add_usage_context(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    geometry = resolve(args.model, settings_from(args))
    defaults = default_budget_from(args, geometry)
    budgets = args.max_num_batched_tokens or [defaults.max_num_batched_tokens]
    seqs = defaults.max_num_seqs if args.max_num_seqs is None else args.max_num_seqs
    memory = memory_from(args, max_num_seqs=seqs)
    rows = [kv_left(geometry, memory, budget) for budget in budgets]
    if args.json:
        print_json(
            {
                "geometry": geometry.to_json(),
                "default_budget": defaults._asdict(),
                "max_num_seqs": memory.max_num_seqs,
                "budgets": [row.to_json() for row in rows],
            }
        )
        return
    print(
        f"{geometry.model}: block {geometry.block_size} tokens, max_model_len "
        f"{geometry.max_model_len}, {args.gpu_memory / GIB:.1f} GiB per GPU"
    )
    print_table(
        ["budget", "weights GiB", "activation GiB", "graphs GiB", "KV GiB", "KV tokens",
         "concurrency", "requests", "fits"],
        [
            [
                row.max_num_batched_tokens,
                *(
                    f"{part / GIB:.2f}"
                    for part in (
                        row.weight_bytes,
                        row.activation_bytes,
                        row.graph_bytes,
                        row.kv_bytes,
                    )
                ),
                row.kv_tokens,
                f"{row.concurrency:.2f}x",
                row.requests_of_max_model_len,
                "yes" if row.fits else "no",
            ]
            for row in rows
        ],
    )  # fmt: skip
    print(f"\n{rows[0].evidence}: {rows[0].formula}")
    if not args.max_num_batched_tokens:
        print(defaults.reason)
    for note in geometry.notes:
        print(f"note: {note}")
