"""Two measurements of one engine, as one table."""

from chunk_planner.cost import Point
from chunk_planner.errors import PlannerError
from chunk_planner.tables.match import hard_mismatches
from chunk_planner.tables.table import Table, engine_table


def merge(first: Table, second: Table) -> Table:
    """One engine table of two measurements of the same engine, refitted; needs scipy.

    A step that both have gets the repeats of both; its quantiles are averaged by repeats.

    Raises:
        PlannerError: tables of different engines, or kernel tables.
    """
    from chunk_planner.fit import fit, order

    for table in (first, second):
        _ = table.cost  # refuses a kernel table
    differ = hard_mismatches(first.fingerprint, second.fingerprint)
    if differ:
        raise PlannerError(f"these tables are not of the same engine: {'; '.join(differ)}")
    both: dict[tuple, Point] = {}
    for point in [*first.points, *second.points]:
        key = (point.prefill, point.decode_kv)
        both[key] = _pooled(both[key], point) if key in both else point
    points = sorted(both.values(), key=order)
    newest = max(first, second, key=lambda t: t.data["provenance"]["measured_at"])
    notes = [
        f"{t.data['provenance']['command']} ({t.data['provenance']['measured_at']})"
        for t in (first, second)
    ]
    provenance = {
        "measured_at": newest.data["provenance"]["measured_at"],
        "command": "chunk-planner tables merge",
        "complete": all(t.data["provenance"]["complete"] for t in (first, second)),
        "notes": notes,
    }
    return engine_table(
        points, fit(points), newest.fingerprint, provenance, newest.data.get("memory")
    )


def _pooled(a: Point, b: Point) -> Point:
    total = a.repeats + b.repeats

    def mean(x: float, y: float) -> float:
        return (x * a.repeats + y * b.repeats) / total

    return Point(
        a.prefill,
        a.decode_kv,
        mean(a.p20_us, b.p20_us),
        mean(a.p50_us, b.p50_us),
        mean(a.p80_us, b.p80_us),
        total,
    )
