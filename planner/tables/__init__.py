"""Tuning tables: measured costs in JSON files, one per engine and device.

table = load_table(path)
table.cost.step_us(prefill=[(2304, 0)], decode_kv=[8000])
find(fingerprint).table
"""

from chunk_planner.tables.merge import merge
from chunk_planner.tables.search import Found, find, search_path, table_files, user_folder
from chunk_planner.tables.table import (
    Table,
    check,
    engine_table,
    file_prefix,
    load_table,
    model_name,
)

__all__ = [
    "Found",
    "Table",
    "check",
    "engine_table",
    "file_prefix",
    "find",
    "load_table",
    "merge",
    "model_name",
    "search_path",
    "table_files",
    "user_folder",
]
