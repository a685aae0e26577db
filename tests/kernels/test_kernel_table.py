"""From the raw JSON of a sweep to a tuning table that the planner reads."""

import json
from pathlib import Path

import pytest

pytest.importorskip("jsonschema")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZES = {"small": 10_000_000, "large": 100_000_000}


@pytest.fixture
def kernel_table(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import kernel_table

    return kernel_table


@pytest.fixture
def raw():
    """A sweep of a made-up device on which a copy takes 5 us and 1000 GB/s exactly."""
    rows = []
    for shape in ("large", "small"):
        for requests in (1, 4):
            moved = 2 * requests * SIZES[shape]
            time = 5 + moved / 1e6
            rows.append(
                {
                    "shape": shape,
                    "kernel": "copy_states",
                    "requests": requests,
                    "p20_us": time - 1,
                    "p50_us": time,
                    "p80_us": time + 1,
                    "repeats": 30,
                    "moved_bytes": moved,
                    "gb_per_s": moved / time / 1e3,
                    "percent_of_copy": 90.0,
                }
            )
        arm = {"p50_us": 10.0}
        rows.append(
            {
                "shape": shape,
                "kernel": "scan_states (gdn)",
                "chunk_tokens": 1152,
                "without_checkpoints": arm,
                "with_checkpoints": arm,
            }
        )
    return {
        "kind": "kernel-sweep",
        "schema_version": 1,
        "machine": {
            "device_name": "Made Up 9000",
            "torch": "2.0",
            "triton": "3.0",
            "cuda": "13.0",
            "hip": None,
            "date": "2026-01-02T03:04:05+00:00",
            "copy_gb_per_s": 1000.0,
        },
        "command": "python benchmarks/chunk_sweep.py --device cuda",
        "stopped": None,
        "shapes": {name: {"checkpoint_bytes": size} for name, size in SIZES.items()},
        "rows": rows,
    }


def test_table_prices_one_checkpoint_of_one_request(kernel_table, raw, tmp_path, capsys):
    from chunk_planner.tables import load_table

    file = tmp_path / "raw.json"
    file.write_text(json.dumps(raw))
    assert kernel_table.main([str(file), "--out", str(tmp_path / "tables"), "--plot"]) == 0
    written = tmp_path / "tables" / "kernels,device_name=Made_Up_9000.json"
    table = load_table(written)
    assert table.evidence == "measured-kernel"
    assert table.checkpoint_us(SIZES["small"]) == pytest.approx(25.0)
    assert table.checkpoint_us(55_000_000) == pytest.approx(115.0)
    assert table.data["provenance"]["complete"] is True
    assert written.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "copies: 5.0 us + bytes moved at 1000 GB/s" in capsys.readouterr().out


def test_a_sweep_that_stopped_says_so(kernel_table, raw):
    raw["stopped"] = "Ctrl-C"
    table = kernel_table.table_of(raw)
    assert table.data["provenance"]["complete"] is False
    assert "stopped early: Ctrl-C" in table.data["provenance"]["notes"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kind": "other"}, "not the raw JSON"),
        ({"schema_version": 9}, "schema_version is 9"),
        ({"rows": []}, "rows: none is the copy of one request"),
        (None, "field 'machine' is missing"),
    ],
)
def test_names_what_is_wrong_with_a_file(kernel_table, raw, tmp_path, capsys, change, complaint):
    if change is None:
        del raw["machine"]
    else:
        raw |= change
    file = tmp_path / "raw.json"
    file.write_text(json.dumps(raw))
    assert kernel_table.main([str(file), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert "raw.json" in error
