"""`chunk-planner recommend`: the budget to set instead, and the price of the alternatives."""

import argparse

from chunk_planner import advice
from chunk_planner.budget import recommend
from chunk_planner.cli.candidates_table import print_candidates
from chunk_planner.cli.options import add_json, count, json_object
from chunk_planner.cli.render import print_json
from chunk_planner.cli.rule_options import add_rule_arguments, rule_from
from chunk_planner.errors import PlannerError
from chunk_planner.recommendation import Constraints

#: switches of `--speculative-config` that the chunk rule depends on
_DRAFTER_SWITCHES = (
    "parallel_drafting",
    "disable_eagle_block_drop",
    "disable_lookahead_block_hashes",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from chunk_planner.cli.model_options import (
        add_memory_arguments,
        add_model_arguments,
        add_usage_context,
    )

    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="folder with config.json, that file, or a well-known name; not needed where "
        "--block-size and --max-num-batched-tokens are given",
    )
    add_rule_arguments(parser, required=False)
    add = parser.add_argument
    add("--max-num-seqs", type=count, metavar="N", help="default 256, or vLLM's for --gpu-memory")
    add("--num-speculative-tokens", type=count, metavar="K")
    add("--expected-decodes", type=count, metavar="N", help="decoding requests that share a step")
    add("--short-prompt-tokens", type=count, metavar="TOKENS", help="room kept for a short prompt")
    add("--prompt-tokens", type=count, metavar="TOKENS", help="a typical long prompt")
    add("--max-model-len", type=count, metavar="TOKENS")
    add("--lmcache", action="store_true", help="the engine runs with LMCache")
    add(
        "--kv-transfer-config",
        type=json_object,
        metavar="JSON",
        help="as vLLM's; LMCache is recognised in it",
    )
    add("--table", metavar="FILE", help="tuning table (default: one measured on MODEL, if found)")
    add("--slo-itl-ms", type=float, metavar="MS", help="longest step a decode may share")
    add("--slo-ttft-s", type=float, metavar="S", help="longest prefill of the typical prompt")
    add_json(parser)
    anywhere = vars(parser.parse_args([]))
    add_model_arguments(parser, model=False, rule_flags=False)
    add_memory_arguments(parser, required=False)
    add_usage_context(parser)
    every = vars(parser.parse_args([]))
    parser.set_defaults(of_a_model={n: v for n, v in every.items() if n not in anywhere})


def run(args: argparse.Namespace) -> None:
    connector = _connector(args.kv_transfer_config)
    args.lmcache = args.lmcache or "lmcache" in (connector or "").lower()
    target = _from_model(args, connector) if args.model else _from_flags(args)
    rule, said = target["rule"], target.get("said", [])
    cost, price = None, None
    # Tables need a schema validator to load: not touched where none can apply.
    if args.table or args.model:
        from chunk_planner.cli.table_choice import checkpoint_us, named_table, table_for_model

        if args.table:
            choice = named_table(args.table, rule.block_size)
        else:
            choice = table_for_model(args.model, args.tensor_parallel_size, rule.block_size)
        said = [*said, *choice.notes]
        if choice.table is not None:
            cost = choice.table.cost
            if "checkpoint_bytes" in target:
                device = choice.table.fingerprint["device_name"]
                price = checkpoint_us(device, target["checkpoint_bytes"])
    found = recommend(
        rule,
        max_num_seqs=target["max_num_seqs"],
        num_speculative_tokens=target["num_speculative_tokens"],
        expected_decodes=args.expected_decodes,
        short_prompt_tokens=args.short_prompt_tokens,
        kv_cache_requests=target.get("kv_cache_requests"),
        prompt_tokens=args.prompt_tokens,
        cost=cost,
        checkpoint_us=price,
        constraints=Constraints(
            max_model_len=target["max_model_len"],
            kv_left=target.get("kv_left"),
            lmcache=args.lmcache,
            slo_itl_ms=args.slo_itl_ms,
            slo_ttft_s=args.slo_ttft_s,
        ),
    )
    said, notes = [*advice.reasons(found), *said], target.get("notes", [])
    if args.json:
        print_json({**found.to_json(), "reasons": said, "notes": notes})
        return
    print_candidates(found)
    for sentence in said:
        print(f"\n{sentence}")
    if notes:
        print()
    for note in notes:
        print(f"note: {note}")


def _from_flags(args: argparse.Namespace) -> dict:
    for flag in ("block_size", "max_num_batched_tokens"):
        if getattr(args, flag) is None:
            raise PlannerError(f"give MODEL, or --{flag.replace('_', '-')}")
    ignored = [name for name, default in args.of_a_model.items() if getattr(args, name) != default]
    if ignored:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in ignored)
        raise PlannerError(
            f"{flags}: says something about a model only; give MODEL too, a folder with config.json"
            " or a well-known name"
        )
    return {
        "rule": rule_from(args),
        "max_num_seqs": 256 if args.max_num_seqs is None else args.max_num_seqs,
        "num_speculative_tokens": args.num_speculative_tokens or 0,
        "max_model_len": args.max_model_len,
    }


def _from_model(args: argparse.Namespace, connector: str | None) -> dict:
    """What a model's config and vLLM's flags say about the engine they will start."""
    from chunk_planner.cli.model_options import default_budget_from, memory_from, settings_from
    from chunk_planner.geometry import kv_left, one_block_requests, resolve
    from chunk_planner.speculative import rule_fields

    args.vllm_version = args.vllm_version or ""
    settings = settings_from(args)
    geometry = resolve(args.model, settings)
    said = []
    seqs = args.max_num_seqs
    budget = args.max_num_batched_tokens
    if args.gpu_memory is not None:
        defaults = default_budget_from(args, geometry)
        if seqs is None:
            seqs = defaults.max_num_seqs
        if budget is None:
            budget = defaults.max_num_batched_tokens
            said.append(f"Budget {budget}: {defaults.reason}.")
    if budget is None:
        raise PlannerError(
            "give --max-num-batched-tokens, or --gpu-memory to start from vLLM's own default"
        )
    seqs = 256 if seqs is None else seqs
    # The flag is the base block; the rule works on the block it leads to.
    args.block_size = geometry.block_size
    args.max_num_batched_tokens = budget
    args.vllm_version = geometry.vllm_version
    k = geometry.num_speculative_tokens
    drafter = args.speculative_config or {}
    drafting = rule_fields(
        settings.speculative_method,
        k,
        geometry.vllm_version,
        mtp_modules=geometry.config.integer("num_nextn_predict_layers", 1, minimum=0),
        kv_connector=bool(connector) or args.lmcache,
        **{name: bool(value) for name, value in drafter.items() if name in _DRAFTER_SWITCHES},
    )
    rule = rule_from(args, checkpoint_alignment=geometry.checkpoint_alignment, **drafting)
    target = {
        "rule": rule,
        "max_num_seqs": seqs,
        "num_speculative_tokens": k,
        "max_model_len": geometry.max_model_len,
        "checkpoint_bytes": geometry.checkpoint_bytes,
        "said": said,
        "notes": list(geometry.notes),
    }
    memory = memory_from(args, max_num_seqs=seqs)
    if memory is not None:
        left = kv_left(geometry, memory, budget)
        said.append(f"KV cache left is {left.evidence}: {left.formula}.")
        target["kv_left"] = lambda tokens: kv_left(geometry, memory, tokens)
        target["kv_cache_requests"] = one_block_requests(geometry, left)
    return target


def _connector(config: dict | None) -> str | None:
    """The connector's name in `--kv-transfer-config`."""
    if config is None:
        return None
    if not isinstance(config.get("kv_connector"), str):
        raise PlannerError("--kv-transfer-config must be a JSON object with a kv_connector name")
    return config["kv_connector"]
