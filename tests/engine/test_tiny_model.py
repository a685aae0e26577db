"""The tiny models' configs; the engine itself runs them in the other tests of this folder."""

import json
from pathlib import Path

import pytest

from chunk_planner.engine.tiny_model import tiny_server_flags, write_tiny_model
from chunk_planner.errors import PlannerError


@pytest.mark.parametrize(("family", "block"), [("qwen3-next", 1152), ("granite-4", 384)])
def test_the_default_block_holds_a_state(tmp_path: Path, family: str, block: int) -> None:
    """One block of K and V must hold a layer's state, or `--block-size` is not the block."""
    default = json.loads((write_tiny_model(tmp_path / "a", family) / "config.json").read_text())
    named = json.loads(
        (write_tiny_model(tmp_path / "b", family, block) / "config.json").read_text()
    )
    assert default == named
    kv_bytes = 2 * named["num_key_value_heads"] * 64 * 2
    assert kv_bytes * block >= 64 * 64 * 4


def test_a_small_block_gets_more_kv_heads(tmp_path: Path) -> None:
    heads = [
        json.loads((write_tiny_model(tmp_path, block=block) / "config.json").read_text())[
            "num_key_value_heads"
        ]
        for block in (1152, 64, 32)
    ]
    assert heads == [1, 2, 3]


@pytest.mark.parametrize(
    ("family", "block", "says"),
    [
        ("mamba", None, "family is 'mamba'; it must be one of qwen3-next, granite-4"),
        ("qwen3-next", 100, "block is 100; a tiny qwen3-next takes multiples of 32 from 32 on"),
        ("granite-4", 256, "block is 256; a tiny granite-4 takes multiples of 32 from 288 on"),
    ],
)
def test_what_cannot_be_made_is_refused(tmp_path: Path, family, block, says: str) -> None:
    with pytest.raises(PlannerError, match=says):
        write_tiny_model(tmp_path, family, block)


def test_flags_are_the_arguments(tmp_path: Path) -> None:
    flags = tiny_server_flags(384)
    assert flags[flags.index("--block-size") + 1] == "384"
    assert "--skip-tokenizer-init" in flags
    assert "True" not in flags
