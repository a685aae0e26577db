"""A table in memory: reading and checking a file, its costs, writing it."""

import json
import os
import re
import tempfile
from bisect import bisect_left
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

from chunk_planner.cost import Point, StepCost
from chunk_planner.errors import PlannerError
from chunk_planner.tables.schema import MAX_BYTES, SCHEMA_VERSION, SCHEMAS


@dataclass(frozen=True)
class Table:
    """A checked table. `data` is the file's content, as the schema describes it."""

    data: dict
    path: Path | None = None

    @property
    def evidence(self) -> str:
        """`measured-engine` (whole steps) or `measured-kernel` (state checkpoints)."""
        return self.data["evidence"]

    @property
    def fingerprint(self) -> dict:
        return self.data["fingerprint"]

    @property
    def points(self) -> list[Point]:
        """The measured steps of an engine table, by size."""
        return [
            Point(
                tuple((n, kv) for n, kv in p["prefill_tokens"]),
                tuple(p["decode_kv_tokens"]),
                p["p20_us"],
                p["p50_us"],
                p["p80_us"],
                p["repeats"],
            )
            for p in self.data["points"]
        ]

    @property
    def cost(self) -> StepCost:
        """Step costs of an engine table.

        Raises:
            PlannerError: a kernel table, which prices checkpoints and never a step.
        """
        if self.evidence != "measured-engine":
            raise PlannerError(
                f"{self.path or 'this table'} prices state checkpoints, not steps; measure steps "
                "with 'chunk-planner calibrate'"
            )
        fit = {k: tuple(v) if isinstance(v, list) else v for k, v in self.data["fit"].items()}
        return StepCost(**fit, measure_with=f"chunk-planner calibrate {self.fingerprint['model']}")

    def checkpoint_us(self, state_bytes: int) -> float:
        """Microseconds to store one request's state, by its bytes over all layers.

        Raises:
            PlannerError: an engine table, or a state outside the measured sizes.
        """
        if self.evidence != "measured-kernel":
            raise PlannerError(f"{self.path or 'this table'} prices steps, not state checkpoints")
        rows = self.data["checkpoint"]
        sizes = [row["state_bytes"] for row in rows]
        if not sizes[0] <= state_bytes <= sizes[-1]:
            raise PlannerError(
                f"a state of {state_bytes} bytes was not measured ({sizes[0]} to {sizes[-1]} were)"
                "; measure it with 'benchmarks/chunk_sweep.py --device cuda'"
            )
        i = max(1, bisect_left(sizes, state_bytes))
        low, high = rows[i - 1], rows[min(i, len(rows) - 1)]
        if low is high:
            return low["p50_us"]
        share = (state_bytes - low["state_bytes"]) / (high["state_bytes"] - low["state_bytes"])
        return low["p50_us"] + share * (high["p50_us"] - low["p50_us"])

    @property
    def file_name(self) -> str:
        """The name vLLM's own tables taught people to look for."""
        f = self.fingerprint
        if self.evidence == "measured-kernel":
            return f"kernels,device_name={_plain(f['device_name'])}.json"
        return (
            file_prefix(f["model"], f["tensor_parallel_size"])
            + f"kv={_plain(f['kv_cache_dtype'])},block={f['block_size']},"
            f"device_name={_plain(f['device_name'])}.json"
        )

    def write(self, path: str | Path) -> Path:
        """Write the table to `path` (or under its own name into the folder `path`), atomically."""
        path = Path(path)
        if path.suffix != ".json":
            path = path / self.file_name
        text = json.dumps(self.data, allow_nan=False, indent=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd, scratch = tempfile.mkstemp(dir=path.parent, prefix=".table-", suffix=".tmp")
            try:
                with os.fdopen(fd, "w", encoding="utf-8") as file:
                    file.write(text + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                os.chmod(scratch, 0o644)
                os.replace(scratch, path)
            except BaseException:
                Path(scratch).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise PlannerError(f"cannot write {path}: {error.strerror}") from None
        return path


def engine_table(
    points: list[Point], cost: StepCost, fingerprint: dict, provenance: dict, memory: dict | None
) -> Table:
    """An engine table of measured points and their fit."""
    fit = {f.name: getattr(cost, f.name) for f in fields(StepCost)}
    for name in ("evidence", "measure_with"):
        del fit[name]
    data = {
        "schema_version": SCHEMA_VERSION,
        "evidence": "measured-engine",
        "fingerprint": fingerprint,
        "provenance": provenance,
        "points": [_point_json(point) for point in points],
        "fit": fit,
    }
    if memory:
        data["memory"] = memory
    # through JSON, so that a table just measured and the same one read back are equal
    return check(json.loads(json.dumps(data)))


def load_table(path: str | Path) -> Table:
    """Read and check a table file.

    Raises:
        PlannerError: the file cannot be read or is not a table; names the file, the field and
            what to do about it.
    """
    path = Path(path)
    try:
        return check(read_json(path), path)
    except PlannerError as error:
        fix = "measure again with 'chunk-planner calibrate'"
        if isinstance(error.__cause__, OSError):
            fix = "'chunk-planner tables list' shows the tables there are"
        raise PlannerError(f"{error}; {fix}") from None


def read_json(path: Path) -> object:
    """A JSON document from a file that may be anything.

    Raises:
        PlannerError: unreadable, too large, not UTF-8, not JSON, or with NaN in it.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise PlannerError(
                f"{path}: {size} bytes is too large for a table (at most {MAX_BYTES})"
            )
        text = path.read_bytes().decode("utf-8")
        return json.loads(text, parse_constant=_refuse_constant)
    except PlannerError:
        raise
    except OSError as error:
        raise PlannerError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        reason = str(error).split("\n")[0][:120] or type(error).__name__
        raise PlannerError(f"{path}: not a table: {reason}") from None


def check(data: object, path: Path | None = None) -> Table:
    """A table from a JSON document, checked.

    Raises:
        PlannerError: names the file and the field that is wrong.
    """
    where = path or "table"
    if not isinstance(data, dict):
        raise PlannerError(f"{where}: not a table: a {type(data).__name__}, not an object")
    version, evidence = data.get("schema_version"), data.get("evidence")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise PlannerError(
            f"{where}: schema_version is {_short(version)}; this release reads {SCHEMA_VERSION}"
        )
    if not isinstance(evidence, str) or evidence not in SCHEMAS:
        raise PlannerError(
            f"{where}: evidence is {_short(evidence)}; it must be one of {', '.join(SCHEMAS)}"
        )
    import jsonschema

    validator = jsonschema.Draft202012Validator(SCHEMAS[evidence])
    error = next(iter(validator.iter_errors(data)), None)
    if error is not None:
        field = error.json_path.removeprefix("$").removeprefix(".") or "the table"
        raise PlannerError(f"{where}: {field}: {_short(error.message, 160)}")
    _check_order(data, where)
    return Table(data, path)


def _check_order(data: dict, where: object) -> None:
    """What a schema has no word for: order, and quantiles that are quantiles."""
    kind = "points" if data["evidence"] == "measured-engine" else "checkpoint"
    before = None
    for i, row in enumerate(data[kind]):
        if not row["p20_us"] <= row["p50_us"] <= row["p80_us"]:
            raise PlannerError(f"{where}: {kind}[{i}]: p20_us, p50_us, p80_us do not rise")
        if kind == "checkpoint":
            size = row["state_bytes"]
        else:
            size = sum(n for n, _ in row["prefill_tokens"]) + len(row["decode_kv_tokens"])
        if size == 0:
            raise PlannerError(f"{where}: {kind}[{i}]: nothing is scheduled in this step")
        if before is not None and (size < before or (kind == "checkpoint" and size == before)):
            raise PlannerError(f"{where}: {kind}[{i}]: not sorted by size ({size} after {before})")
        before = size
    if kind == "checkpoint":
        return
    fit = data["fit"]
    knots, times = fit["knots_tokens"], fit["knots_us"]
    if len(knots) != len(times):
        raise PlannerError(f"{where}: fit.knots_us: {len(times)} values for {len(knots)} knots")
    if any(b <= a for a, b in pairwise(knots)):
        raise PlannerError(f"{where}: fit.knots_tokens: not strictly rising")
    if any(b < a for a, b in pairwise(times)):
        raise PlannerError(f"{where}: fit.knots_us: falls, but a step curve never does")


def _point_json(point: Point) -> dict:
    return {
        "prefill_tokens": point.prefill,
        "decode_kv_tokens": point.decode_kv,
        "p20_us": round(point.p20_us, 1),
        "p50_us": round(point.p50_us, 1),
        "p80_us": round(point.p80_us, 1),
        "repeats": point.repeats,
    }


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _short(value: object, most: int = 60) -> str:
    text = value if isinstance(value, str) and most > 60 else repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def file_prefix(model: str, tensor_parallel_size: int) -> str:
    """What the file names of an engine's tables begin with."""
    return f"model={_plain(model)},tp={tensor_parallel_size},"


def model_name(model: str) -> str:
    """A model's own name, of its path or repository; never empty.

    With HF_HUB_OFFLINE vLLM puts the snapshot's path, `models--org--name/snapshots/hash`, in the
    place of the name it was given.
    """
    path = Path(os.path.abspath(model))  # `.` has a name, and a link keeps its own
    if path.parent.name == "snapshots":
        return path.parent.parent.name.split("--")[-1]
    return path.name or "unnamed"


def _plain(text: str) -> str:
    """Only characters every file system takes, as vLLM writes device names."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", text).strip("_") or "unnamed"
