"""Which tuning table `recommend` prices budgets with, and what to say about it."""

from dataclasses import dataclass, field
from pathlib import Path

from chunk_planner.errors import PlannerError
from chunk_planner.tables import (
    Table,
    file_prefix,
    find,
    load_table,
    model_name,
    search_path,
    table_files,
)


@dataclass(frozen=True)
class TableChoice:
    """The engine table, None where there is none, and sentences about the search."""

    table: Table | None = None
    notes: list[str] = field(default_factory=list)


def named_table(path: str | Path, block_size: int) -> TableChoice:
    """The table the user named.

    Raises:
        PlannerError: it is no engine table, or cannot be read.
    """
    table = load_table(path)
    if table.evidence != "measured-engine":
        raise PlannerError(f"{path} prices state checkpoints, not steps: no budget")
    return TableChoice(table, _about(table, block_size))


def table_for_model(model: str, tensor_parallel_size: int, block_size: int) -> TableChoice:
    """The first table on the search path that was measured on a model of this name.

    Without an engine there is no device and no backend to compare; the sentence names the device
    the table was measured on, and the plugin compares everything at start-up.
    """
    path = Path(model)
    name = model_name(str(path.parent) if path.name == "config.json" else model)
    wanted = file_prefix(name, tensor_parallel_size).lower()
    files = [p for p in table_files(search_path()) if p.name.lower().startswith(wanted)]
    found = find({"tensor_parallel_size": tensor_parallel_size}, places=files)
    notes = [f"{Path(file).name} was not used: {why}." for file, why in found.refused.items()]
    if found.table is not None:
        notes = _about(found.table, block_size)
    return TableChoice(found.table, notes)


def checkpoint_us(device_name: str, state_bytes: int) -> float | None:
    """Price of one checkpoint on this device, None where no kernel table reaches it."""
    found = find({"device_name": device_name}, evidence="measured-kernel")
    if found.table is None:
        return None
    try:
        return found.table.checkpoint_us(state_bytes)
    except PlannerError:
        return None


def _about(table: Table, block_size: int) -> list[str]:
    measured = table.fingerprint
    text = f"Step costs are {table.evidence} on {measured['device_name']} ({table.path})"
    if measured["block_size"] != block_size:
        text += (
            f", at block {measured['block_size']}; the cost of a step depends on its tokens, not "
            "on the block"
        )
    return [text + "."]
