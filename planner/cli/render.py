"""Tables and JSON on the terminal; rich is loaded only when a table is drawn."""

import json
from collections.abc import Iterable, Sequence


def print_json(value: object) -> None:
    """One JSON document on stdout; a value JSON has no word for (NaN, infinity) is an error."""
    print(json.dumps(value, indent=2, allow_nan=False))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None
) -> None:
    """A right-aligned table on stdout. Column names carry the unit, cells are already text."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*[str(cell) for cell in row])
    console = Console(highlight=False)
    if not console.is_terminal:
        # A pipe or a file has no width; 80 columns would fold every header.
        console.width = 140
    console.print(table)
