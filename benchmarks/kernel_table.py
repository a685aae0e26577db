"""Turns the raw JSON of `chunk_sweep.py --device cuda` into a tuning table and its figure.

    python benchmarks/kernel_table.py kernels,device_name=...,....json [--out FOLDER] [--plot]

Runs anywhere, after the measurement. The table, `measured-kernel`, holds what the advice shows
beside its recommendation: microseconds to store the state of one request over all its layers, by
bytes of state. Nothing in it chooses a budget.
"""

import argparse
import sys
from pathlib import Path

import _checkout  # noqa: F401
import numpy as np
from kernel_sweep import RAW_SCHEMA

from chunk_planner.errors import PlannerError
from chunk_planner.tables import Table, check
from chunk_planner.tables.schema import SCHEMA_VERSION
from chunk_planner.tables.table import read_json

QUANTILES = ("p20_us", "p50_us", "p80_us")


def read_raw(path: Path) -> dict:
    """The raw file of a sweep.

    Raises:
        PlannerError: not JSON, not a sweep's, or without a copy of one request in it.
    """
    raw = read_json(path)
    if not isinstance(raw, dict) or raw.get("kind") != "kernel-sweep":
        raise PlannerError(f"{path}: not the raw JSON of 'chunk_sweep.py --device cuda'")
    if raw.get("schema_version") != RAW_SCHEMA:
        raise PlannerError(
            f"{path}: schema_version is {raw.get('schema_version')}, not {RAW_SCHEMA}"
        )
    for field in ("machine", "command", "shapes", "rows"):
        if field not in raw:
            raise PlannerError(f"{path}: field {field!r} is missing")
    if not copies(raw):
        raise PlannerError(f"{path}: rows: none is the copy of one request's checkpoint")
    return raw


def copies(raw: dict, requests: int = 1) -> list[dict]:
    """The `copy_states` rows of so many requests with their state bytes, smallest state first."""
    found = {
        raw["shapes"][row["shape"]]["checkpoint_bytes"]: row
        for row in raw["rows"]
        if row.get("kernel") == "copy_states" and row.get("requests") == requests
    }
    return [{"state_bytes": size, **found[size]} for size in sorted(found)]


def table_of(raw: dict) -> Table:
    """The `measured-kernel` table; raises PlannerError where the schema does not hold."""
    machine = raw["machine"]
    notes = [
        f"copies reach {copies(raw)[-1]['percent_of_copy']} % of this card's "
        f"{machine['copy_gb_per_s']} GB/s copy",
        *([f"stopped early: {raw['stopped']}"] if raw["stopped"] else []),
    ]
    return check(
        {
            "schema_version": SCHEMA_VERSION,
            "evidence": "measured-kernel",
            "fingerprint": {
                "device_name": machine["device_name"],
                "torch_version": machine["torch"],
                "triton_version": machine["triton"],
                "cuda_version": machine["cuda"] or f"hip {machine['hip']}",
            },
            "provenance": {
                "measured_at": machine["date"],
                "command": raw["command"],
                "complete": raw["stopped"] is None,
                "notes": notes,
            },
            "checkpoint": [
                {key: row[key] for key in ("state_bytes", *QUANTILES, "repeats")}
                for row in copies(raw)
            ],
        }
    )


def fit_copy(raw: dict) -> tuple[float, float] | None:
    """Launch microseconds and GB/s (read plus written) of a copy, over all sizes and requests.

    Least squares on relative errors, so that small copies count; None under three sizes.
    """
    rows = [row for row in raw["rows"] if row.get("kernel") == "copy_states"]
    moved = np.array([row["moved_bytes"] for row in rows], dtype=float)
    times = np.array([row["p50_us"] for row in rows], dtype=float)
    if len(set(moved)) < 3:
        return None
    (launch, per_byte), *_ = np.linalg.lstsq(
        np.stack([1 / times, moved / times], axis=1), np.ones(len(rows)), rcond=None
    )
    return float(launch), float(1e-3 / per_byte)


def plot(raw: dict, path: Path) -> None:
    """Left, scan time of a layer by chunk with and without checkpoints; right, copy bandwidth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (scan, copy) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for color, shape in zip(plt.cm.tab10.colors, raw["shapes"], strict=False):
        rows = [row for row in raw["rows"] if row["shape"] == shape]
        scans = [row for row in rows if row["kernel"].startswith("scan_states")]
        chunks = [row["chunk_tokens"] for row in scans]
        for arm, style in (("without_checkpoints", "-"), ("with_checkpoints", "--")):
            times = [row[arm]["p50_us"] for row in scans]
            label = shape if style == "-" else None
            scan.plot(chunks, times, style, color=color, marker=".", label=label)
        copied = [row for row in rows if row["kernel"] == "copy_states"]
        copy.plot(
            [row["moved_bytes"] / 2**20 for row in copied],
            [row["gb_per_s"] for row in copied],
            marker=".",
            color=color,
        )
    scan.set(xlabel="chunk (tokens)", ylabel="state scan of one layer (us, p50)")
    scan.set_title("dashed: state stored at every block boundary", fontsize=9)
    scan.legend(fontsize=7)
    ceiling = raw["machine"]["copy_gb_per_s"]
    copy.axhline(ceiling, color="grey", linewidth=1)
    copy.annotate("PyTorch's copy", (1, ceiling), xycoords=("axes fraction", "data"),
                  ha="right", va="bottom", fontsize=8)  # fmt: skip
    copy.set(xscale="log", xlabel="moved (MiB, read + written)", ylabel="checkpoint copy (GB/s)")
    copy.set_ylim(0, 1.15 * ceiling)
    figure.suptitle(f"{raw['machine']['device_name']}, {raw['machine']['date'][:10]}", fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("raw", type=Path)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the table")
    parser.add_argument("--plot", action="store_true", help="also a PNG beside it")
    args = parser.parse_args(argv)
    try:
        raw = read_raw(args.raw)
        table = table_of(raw)
        written = table.write(args.out)
    except PlannerError as error:
        print(f"kernel_table: {error}", file=sys.stderr)
        return 2
    for row in table.data["checkpoint"]:
        print(
            f"{row['state_bytes'] / 2**20:8.1f} MiB of state: {row['p50_us']:8.1f} us per"
            f" checkpoint and request ({row['p20_us']:.1f} to {row['p80_us']:.1f})"
        )
    if fitted := fit_copy(raw):
        print(f"copies: {fitted[0]:.1f} us + bytes moved at {fitted[1]:.0f} GB/s")
    print(written)
    if args.plot:
        figure = written.with_suffix(".png")
        plot(raw, figure)
        print(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
