"""The README's examples, run as a reader would, print what the README shows."""

import re
import shlex
from pathlib import Path

import pytest

from chunk_planner import cli

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```console\n\$ chunk-planner (.+)\n((?:(?!```).*\n)+)```", README)


def test_readme_shows_examples():
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize(("command", "shown"), EXAMPLES, ids=[c.split()[0] for c, _ in EXAMPLES])
def test_example_prints_what_is_shown(capsys, command, shown):
    assert cli.main(shlex.split(command)) == 0
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()


def test_library_example_gives_the_shown_numbers():
    code, values = (
        re.search(
            r"```python\n(.*?)\n(plan\.steps.*?)\s+# (\(.*?\))\n```", README, re.DOTALL
        ).group(1, 2),
        re.search(r"plan\.idle_share\s+# (\(.*?\))", README)[1],
    )
    scope: dict = {}
    exec(code[0], scope)
    assert str(eval(code[1], scope)) == values
