"""The folder map as users install it: wheel and editable, import names, what an import loads."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "triton", "vllm", "numpy", "rich", "jsonschema", "scipy", "matplotlib")

# Which top-level names resolve, and where the package lies; run away from the checkout.
PROBE = """
import json
from importlib.util import find_spec
names = "chunk_planner chunk_planner.kernels chunk_planner.engine.plugin kernels planner".split()
print(json.dumps({name: bool(find_spec(name)) for name in names}))
"""
MAPPED = (
    '{"chunk_planner": true, "chunk_planner.kernels": true, '
    '"chunk_planner.engine.plugin": true, "kernels": false, "planner": false}'
)


def python(executable: str | Path, code: str, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def installed_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean virtual environment that holds the built wheel and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # setuptools leaves a build/ where it builds, and reuses it
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("planner", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(source)], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=True)
    executable = folder / "env" / "bin" / "python"
    install = [executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True)
    return executable


def test_wheel_installs_only_its_own_name(installed_wheel: Path, tmp_path: Path) -> None:
    assert python(installed_wheel, PROBE, tmp_path) == MAPPED


def test_wheel_carries_every_module_and_data_file(installed_wheel: Path, tmp_path: Path) -> None:
    listing = "import chunk_planner, pathlib; r = pathlib.Path(chunk_planner.__file__).parent; "
    listing += "print('\\n'.join(str(p.relative_to(r)) for p in r.rglob('*') if p.is_file()))"
    packed = set(python(installed_wheel, listing, tmp_path).splitlines())
    tracked = subprocess.run(
        ["git", "ls-files", "planner", "kernels"], cwd=ROOT, capture_output=True, text=True
    )
    files = tracked.stdout.split()
    if tracked.returncode or not files:
        pytest.skip("not a git checkout, so there is no list of tracked files to compare with")
    expected = {f.removeprefix("planner/") for f in files if (ROOT / f).is_file()}
    assert expected - packed == set()


def test_editable_install_has_the_same_names(tmp_path: Path) -> None:
    assert python(sys.executable, PROBE, tmp_path) == MAPPED


def test_import_is_light(tmp_path: Path) -> None:
    code = f"import sys, chunk_planner; print([m for m in {HEAVY} if m in sys.modules])"
    assert python(sys.executable, code, tmp_path) == "[]"


def test_every_public_name_resolves_without_the_serving_stack(tmp_path: Path) -> None:
    code = "import sys, chunk_planner as c; [getattr(c, n) for n in c.__all__]; "
    code += "print([m for m in ('torch', 'triton', 'vllm') if m in sys.modules])"
    assert python(sys.executable, code, tmp_path) == "[]"


def test_plugin_module_is_stdlib_only(tmp_path: Path) -> None:
    code = (
        f"import sys, chunk_planner.engine.plugin; print([m for m in {HEAVY} if m in sys.modules])"
    )
    assert python(sys.executable, code, tmp_path) == "[]"
