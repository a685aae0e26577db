"""Tables and JSON on the terminal; rich is loaded only when a table is drawn."""

import json
import textwrap
from collections.abc import Iterable, Sequence


def print_json(value: object) -> None:
    """One JSON document on stdout; a value JSON has no word for (NaN, infinity) is an error."""
    print(json.dumps(value, indent=2, allow_nan=False))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    key: int = 1,
) -> None:
    """A right-aligned table on stdout. Column names carry the unit, cells are already text.

    No number is ever cut: where a terminal is too narrow, the column names are folded, and columns
    that still do not fit follow in a table below, led by the first `key` columns again.
    """
    from rich.console import Console
    from rich.table import Table

    cells = [[str(cell) for cell in row] for row in rows]
    console = Console(highlight=False)
    if not console.is_terminal:
        # A pipe or a file has no width: one row is one line.
        console.width = _width([_widest(name, cells, i) for i, name in enumerate(columns)])
    if title:
        console.print(title, style="italic", soft_wrap=True)
    for number, group in enumerate(_groups(columns, cells, key, console.width)):
        if number:
            console.print()
        names = [columns[i] for i in group]
        if _width([_widest(columns[i], cells, i) for i in group]) > console.width:
            names = [_folded(columns[i], cells, i) for i in group]
        table = Table(header_style="bold", box=None, pad_edge=False)
        # What a whole terminal is too narrow for, a sentence or a file name, is folded.
        fits = _width([_least(columns[i], cells, i) for i in group]) <= console.width
        for name in names:
            table.add_column(name, justify="right", no_wrap=fits, overflow="fold")
        for row in cells:
            table.add_row(*[row[i] for i in group])
        console.print(table)


def _groups(
    columns: Sequence[str], cells: Sequence[Sequence[str]], key: int, width: int
) -> list[list[int]]:
    """Indices of the columns of each table, every one led by the first `key`."""
    least = [_least(name, cells, i) for i, name in enumerate(columns)]
    if 2 * _width(least[:key]) > width:
        return [[*range(len(columns))]]  # the lead would be most of every table
    groups = [[*range(key)]]
    for i in range(key, len(columns)):
        if len(groups[-1]) > key and _width([least[j] for j in (*groups[-1], i)]) > width:
            groups.append([*range(key)])
        groups[-1].append(i)
    return groups


def _width(widths: Sequence[int]) -> int:
    """Of a table with columns this wide; rich puts two spaces between them."""
    return sum(widths) + 2 * (len(widths) - 1)


def _widest(name: str, cells: Sequence[Sequence[str]], column: int) -> int:
    return max(len(name), *(len(row[column]) for row in cells), 0)


def _least(name: str, cells: Sequence[Sequence[str]], column: int) -> int:
    """Width of a column whose name is folded between words."""
    return _widest(max(name.split(), key=len, default=""), cells, column)


def _folded(name: str, cells: Sequence[Sequence[str]], column: int) -> str:
    return "\n".join(textwrap.wrap(name, max(1, _least(name, cells, column))))
