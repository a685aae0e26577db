"""Makes `chunk_planner` importable from a checkout that nobody installed.

A machine with a GPU may have torch, Triton and NumPy but no pip index, and the import names differ
from the folder names (see `setup.py`), so the path alone is not enough. Importing this module is;
an installed package is left alone. As a command it runs one of the package's modules:

    python benchmarks/_checkout.py chunk_planner.kernels.compile_report --json
"""

import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"chunk_planner": ROOT / "planner", "chunk_planner.kernels": ROOT / "kernels"}


class CheckoutFinder(importlib.abc.MetaPathFinder):
    """Finds the two mapped packages; what is inside them Python's own finder finds."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        folder = FOLDERS.get(fullname)
        if folder is None:
            return None
        return importlib.util.spec_from_file_location(
            fullname, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


if importlib.util.find_spec("chunk_planner") is None:
    sys.meta_path.insert(0, CheckoutFinder())

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
