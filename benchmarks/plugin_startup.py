#!/usr/bin/env python3
"""What the plugin adds to an engine's start, with ten tuning tables on the path.

    python benchmarks/plugin_startup.py --json

A real engine (a tiny model) is started with ten tables on the search path, one of which fits it.
The plugin's own work in the engine's process (installing the hook, then fingerprint, table search,
recommendation and warning, with all it imports) is timed there, as a share of that start.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from chunk_planner.engine.timed_engine import TimedEngine
from chunk_planner.engine.tiny_model import TINY_ENGINE_ENV, tiny_engine_args, write_tiny_model
from chunk_planner.fit import aggregate, fit
from chunk_planner.tables import engine_table

BLOCK, BUDGET, TABLES = 64, 100, 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--starts", type=int, default=3, help="engine starts to take medians of")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a sentence")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chunk-planner-") as folder:
        report = _measure(Path(folder), args.starts)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print(
            f"the plugin takes {report['plugin_s'] * 1e3:.0f} ms of a start of "
            f"{report['start_s']:.1f} s with {TABLES} tables on the path: {report['share']:.2%} "
            f"(measured-engine, medians of {args.starts})"
        )
    return 0


def _measure(folder: Path, starts: int) -> dict:
    model = write_tiny_model(folder / "model", block=BLOCK)
    arguments = tiny_engine_args(BLOCK) | {
        "model": str(model),
        "max_num_batched_tokens": BUDGET,
        "max_num_seqs": 8,
        "max_model_len": 4096,
    }
    tables = folder / "tables"
    env = TINY_ENGINE_ENV | {
        "CHUNK_PLANNER_TABLES": str(tables),
        "XDG_CONFIG_HOME": str(folder / "config"),
    }
    log = folder / "engine.log"
    with TimedEngine(arguments, log, env) as engine:  # fills caches; says who this engine is
        _write_tables(tables, engine.info.fingerprint)
    plugin, total = [], []
    for number in range(starts):
        log = folder / f"engine-{number}.log"
        with TimedEngine(arguments, log, env, patch=_time_plugin) as engine:
            total.append(engine.start_s)
        text = log.read_text()
        spent = [float(s) for s in re.findall(r"^chunk_planner_plugin_s (\S+)$", text, re.M)]
        if len(spent) < 2 or "measured-engine" not in text:
            raise SystemExit(f"the plugin did not speak from a table:\n{text[-2000:]}")
        plugin.append(sum(spent))
    return {
        "evidence": "measured-engine",
        "tables": TABLES,
        "plugin_s": median(plugin),
        "start_s": median(total),
        "share": median(p / t for p, t in zip(plugin, total, strict=True)),
        "starts": starts,
    }


def _write_tables(folder: Path, fingerprint: dict) -> None:
    """Tables of the size a calibration leaves: nine of other engines, one that fits."""
    sizes = [16 * 2**i for i in range(8)]
    steps = [
        (((n, kv),), (), 5e3 + 50 * n + 0.01 * n * kv) for n in sizes for kv in range(0, 4096, 256)
    ]
    points = aggregate(steps)
    cost = fit(points)
    provenance = {"measured_at": "2026-01-01", "command": "made up for timing", "complete": True}
    for number in range(TABLES):
        other = {"tensor_parallel_size": 2 + number} if number else {}
        engine_table(points, cost, fingerprint | other, provenance, None).write(folder)


def _time_plugin() -> None:
    """In the engine's process: time the plugin's two entries. The hook itself is the plugin's."""
    from chunk_planner.engine import plugin

    def timed(function):
        def call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                print(f"\nchunk_planner_plugin_s {time.perf_counter() - start:.6f}", flush=True)

        return call

    # `register` imports vLLM's scheduler, which the engine needs anyway; that is not its cost.
    import vllm.v1.core.sched.scheduler  # noqa: F401

    plugin.register = timed(plugin.register)
    plugin._observe = timed(plugin._observe)


if __name__ == "__main__":
    sys.exit(main())
