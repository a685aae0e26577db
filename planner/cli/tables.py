"""`chunk-planner tables`: list, show, check, compare and merge tuning tables."""

import argparse
from pathlib import Path

from chunk_planner.cli.options import add_json
from chunk_planner.cli.render import print_json, print_table
from chunk_planner.errors import PlannerError
from chunk_planner.tables import Table, load_table, merge, search_path, table_files
from chunk_planner.tables.match import hard_mismatches, soft_mismatches


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    one = actions.add_parser("list", help="every table on the search path")
    add_json(one)
    for name, text in (("show", "a table's step curve"), ("check", "whether files are tables")):
        one = actions.add_parser(name, help=text)
        one.add_argument("files", nargs="+", type=Path, metavar="FILE")
        add_json(one)
    one = actions.add_parser("diff", help="what two tables say about the same steps")
    one.add_argument("files", nargs=2, type=Path, metavar="FILE")
    add_json(one)
    one = actions.add_parser("merge", help="two measurements of one engine, as one table")
    one.add_argument("files", nargs=2, type=Path, metavar="FILE")
    one.add_argument("--output", type=Path, required=True, metavar="PATH")
    add_json(one)


def run(args: argparse.Namespace) -> int:
    return globals()[f"_{args.action}"](args)


def _list(args: argparse.Namespace) -> int:
    rows = []
    for path in table_files(search_path()):
        try:
            rows.append({"path": str(path), **_summary(load_table(path))})
        except PlannerError as error:
            rows.append({"path": str(path), "error": str(error).removeprefix(f"{path}: ")})
    if args.json:
        print_json(rows)
        return 0
    if not rows:
        print("no tables in " + ", ".join(map(str, search_path())))
        return 0
    columns = ("evidence", "model", "device_name", "block_size", "measured_at")
    print_table(
        ("file", "evidence", "model", "device", "block", "measured"),
        [
            (Path(row["path"]).name, *(row.get(c, "") or "" for c in columns))
            if "error" not in row
            else (Path(row["path"]).name, row["error"], "", "", "", "")
            for row in rows
        ],
    )
    return 0


def _show(args: argparse.Namespace) -> int:
    tables = [load_table(path) for path in args.files]
    if args.json:
        print_json([table.data for table in tables])
        return 0
    for table in tables:
        print(f"{table.path}")
        for name, value in table.fingerprint.items():
            print(f"  {name} {value}")
        provenance = table.data["provenance"]
        print(f"  measured {provenance['measured_at']} with: {provenance['command']}")
        if table.evidence == "measured-engine":
            from chunk_planner.cli.calibrate import print_curve

            print_curve(table)
        else:
            print_table(
                ("state (bytes)", "p20 (us)", "p50 (us)", "p80 (us)"),
                [
                    (r["state_bytes"], *(f"{r[q]:.1f}" for q in ("p20_us", "p50_us", "p80_us")))
                    for r in table.data["checkpoint"]
                ],
                title=f"one state checkpoint, {table.evidence}",
            )
    return 0


def _check(args: argparse.Namespace) -> int:
    """Exit code 1 where a file is not a table."""
    results = []
    for path in args.files:
        try:
            results.append({"path": str(path), "ok": True, **_summary(load_table(path))})
        except PlannerError as error:
            results.append({"path": str(path), "ok": False, "error": str(error)})
    if args.json:
        print_json(results)
    else:
        for result in results:
            print(f"{result['path']}: ok" if result["ok"] else result["error"])
    return 0 if all(result["ok"] for result in results) else 1


def _diff(args: argparse.Namespace) -> int:
    first, second = (load_table(path) for path in args.files)
    a, b = first.cost, second.cost
    sizes = sorted(
        n
        for n in {*a.knots_tokens, *b.knots_tokens}
        if max(a.min_tokens, b.min_tokens) <= n <= min(a.max_tokens, b.max_tokens)
    )
    steps = [
        {
            "step_tokens": n,
            "first_us": a.step_us([(n, 0)]),
            "second_us": b.step_us([(n, 0)]),
            "ratio": b.step_us([(n, 0)]) / a.step_us([(n, 0)]),
        }
        for n in sizes
    ]
    noise = a.noise + b.noise
    hard = hard_mismatches(first.fingerprint, second.fingerprint)
    soft = soft_mismatches(first.fingerprint, second.fingerprint)
    if args.json:
        print_json({"engine": hard, "versions": soft, "noise": noise, "steps": steps})
        return 0
    for line in (*hard, *soft):
        # the words of the match are an engine's against a table's; here both are tables
        print(line.replace(" is ", " of the second is ").replace("the table's", "the first's"))
    print_table(
        ("step (tokens)", "first (ms)", "second (ms)", "second / first"),
        [
            (
                s["step_tokens"],
                f"{s['first_us'] / 1e3:.2f}",
                f"{s['second_us'] / 1e3:.2f}",
                f"{s['ratio']:.2f}" + ("" if abs(s["ratio"] - 1) > noise else " (noise)"),
            )
            for s in steps
        ],
        title="Prefill steps without history, measured-engine",
    )
    return 0


def _merge(args: argparse.Namespace) -> int:
    table = merge(*(load_table(path) for path in args.files))
    path = table.write(args.output)
    if args.json:
        print_json({"path": str(path), **_summary(table)})
    else:
        print(f"wrote {path}")
    return 0


def _summary(table: Table) -> dict:
    data = table.data
    summary = {
        "evidence": table.evidence,
        "model": table.fingerprint.get("model"),
        "device_name": table.fingerprint["device_name"],
        "block_size": table.fingerprint.get("block_size"),
        "measured_at": data["provenance"]["measured_at"],
        "complete": data["provenance"]["complete"],
    }
    if table.evidence == "measured-engine":
        cost = table.cost
        summary |= {
            "points": len(data["points"]),
            "min_tokens": cost.min_tokens,
            "max_tokens": cost.max_tokens,
            "max_context_tokens": cost.max_context_tokens,
            "error_median": cost.error_median,
            "error_p90": cost.error_p90,
            "noise": cost.noise,
            "knee_tokens": cost.plateau().knee_tokens,
        }
    return summary
