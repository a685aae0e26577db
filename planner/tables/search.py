"""Finding the table of an engine: the folders, in order, and what was said about each file."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chunk_planner.errors import PlannerError
from chunk_planner.tables.match import hard_mismatches, soft_mismatches
from chunk_planner.tables.schema import SCHEMAS
from chunk_planner.tables.table import Table, check, read_json


@dataclass
class Found:
    """The table of an engine, or None, and what there is to say about the search.

    refused: file -> why it could not be used, for every table looked at.
    soft: differences that do not matter enough to refuse `table`.
    folders: where was looked, in order.
    """

    table: Table | None = None
    soft: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """One line for a log: the file used, or the names tried and why not."""
        if self.table is not None:
            differences = f" ({'; '.join(self.soft)})" if self.soft else ""
            return f"step costs from {self.table.path}{differences}"
        if not self.refused:
            return f"no tuning table in {', '.join(self.folders)}"
        tried = "; ".join(f"{Path(name).name}: {why}" for name, why in self.refused.items())
        return f"no tuning table fits this engine ({tried})"


def user_folder() -> Path:
    """Where `chunk-planner calibrate` writes."""
    import platformdirs

    return platformdirs.user_config_path("chunk-planner") / "tables"


def search_path() -> list[Path]:
    """`CHUNK_PLANNER_TABLES` (files or folders, separated as in PATH), the user's, the shipped."""
    named = [Path(p) for p in os.environ.get("CHUNK_PLANNER_TABLES", "").split(os.pathsep) if p]
    return [*named, user_folder(), Path(__file__).parent]


def table_files(places: Iterable[Path]) -> list[Path]:
    """The .json files of folders, and files named themselves, in order."""
    found: list[Path] = []
    for place in places:
        try:
            files = sorted(place.glob("*.json")) if place.is_dir() else [place]
            found += [file for file in files if file.is_file()]
        except OSError:
            continue
    return found


def find(
    fingerprint: dict,
    evidence: str = "measured-engine",
    places: Sequence[Path] | None = None,
) -> Found:
    """The best table for an engine: the first place that has one, the fewest soft differences.

    Never raises for a file that is not a table; it is listed in `Found.refused`. Only the table
    that is used is checked against the schema, so a full folder costs a JSON parse a file.
    """
    places = search_path() if places is None else places
    found = Found(folders=[str(place) for place in places])
    for place in places:
        fits = []
        for path in table_files([place]):
            try:
                data = read_json(path)
            except PlannerError as error:
                found.refused[str(path)] = str(error).removeprefix(f"{path}: ")
                continue
            why = _why_not(data, evidence, fingerprint)
            if why == "":
                fits.append((soft_mismatches(data["fingerprint"], fingerprint), path, data))
            elif why is not None:
                found.refused[str(path)] = why
        for soft, path, data in sorted(fits, key=lambda fit: (len(fit[0]), str(fit[1]))):
            try:
                found.table, found.soft = check(data, path), soft
                return found
            except PlannerError as error:
                found.refused[str(path)] = str(error).removeprefix(f"{path}: ")
    return found


def _why_not(data: object, evidence: str, fingerprint: dict) -> str | None:
    """Why a parsed file cannot be used; "" if it may be, None if it is not meant for this."""
    if not isinstance(data, dict) or not isinstance(data.get("fingerprint"), dict):
        return "not a table: no fingerprint"
    if data.get("evidence") != evidence:
        other = data.get("evidence") in list(SCHEMAS)
        return None if other else "not a table: no evidence"
    return "; ".join(hard_mismatches(data["fingerprint"], fingerprint))
