"""`chunk-planner block-size`: block size and state bytes, before the first start."""

import argparse

from chunk_planner.cli.model_options import add_model_arguments, settings_from
from chunk_planner.cli.options import add_json
from chunk_planner.cli.render import print_json
from chunk_planner.geometry import Geometry, resolve
from chunk_planner.geometry.explain import explain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--explain", action="store_true", help="show the arithmetic")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    geometry = resolve(args.model, settings_from(args))
    if args.json:
        found = geometry.to_json()
        print_json({**found, "explain": explain(geometry)} if args.explain else found)
        return
    for line in summary(geometry):
        print(line)
    if args.explain:
        print()
        for line in explain(geometry):
            print(line)
    for note in geometry.notes:
        print(f"note: {note}")


def summary(geometry: Geometry) -> list[str]:
    """The answer in a few aligned lines."""
    g = geometry
    settings = g.settings
    rows = [
        (
            "model",
            f"{g.model} ({g.family}, {g.mamba_layers} state + {g.attention_layers} attention "
            "layers)",
        ),
        (
            "engine",
            f"vLLM {g.vllm_version}, TP {settings.tensor_parallel_size}, {g.attention_backend}, "
            f"{g.kv_cache_dtype} KV, {g.mamba_ssm_cache_dtype} state, "
            f"{g.num_speculative_tokens} drafted tokens",
        ),
        ("block size", f"{g.block_size} tokens (a multiple of {g.grid_tokens})"),
        ("padding", f"{g.padding_percent:.2f} %"),
        (
            "state",
            f"{g.state_bytes_per_layer} B per layer "
            f"({g.conv_bytes} convolution + {g.recurrent_bytes} recurrent)",
        ),
        ("checkpoint", f"{g.checkpoint_bytes} B ({g.checkpoint_bytes / 2**20:.1f} MiB)"),
        (
            "KV",
            f"{g.attention.page_bytes} B per token and layer, {g.kv_bytes_per_token} B per token",
        ),
    ]
    return [f"{name:<11}{text}" for name, text in rows]
