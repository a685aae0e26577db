"""Tuning tables: whatever a file holds, it is a checked table or one clear error."""

import copy
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chunk_planner.cli import main
from chunk_planner.errors import PlannerError
from chunk_planner.fit import fit
from chunk_planner.tables import (
    Table,
    check,
    engine_table,
    find,
    load_table,
    merge,
    model_name,
)
from chunk_planner.tables.schema import MAX_BYTES

ENGINE = {
    "device_name": "NVIDIA H100 80GB HBM3",
    "device_count": 8,
    "host_threads": 8,
    "tensor_parallel_size": 8,
    "pipeline_parallel_size": 1,
    "expert_parallel": True,
    "model": "GLM-5.3-Flash",
    "geometry_hash": "0123456789abcdef",
    "weight_dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "state_dtype": "float32",
    "block_size": 1152,
    "attention_backend": "auto",
    "linear_attention_backend": "triton",
    "enforce_eager": False,
    "speculative_decoding": "none",
    "vllm_version": "0.32.0",
    "torch_version": "2.13.0",
    "triton_version": "3.9.0",
    "cuda_version": "13.0",
}
PROVENANCE = {"measured_at": "2026-12-01T10:00:00+00:00", "command": "test", "complete": True}


def make_table(scale: float = 1.0, **fingerprint) -> Table:
    from chunk_planner.fit import aggregate

    sizes = (16, 128, 512, 1152, 2304)
    steps = [(((n, kv),), (), scale * (5000 + 20 * n + kv)) for n in sizes for kv in (0, n)]
    steps += [((), (kv,) * d, scale * (4000 + kv + 9 * d)) for kv in (64, 4000) for d in (1, 4)]
    points = aggregate(steps * 2)
    return engine_table(points, fit(points), ENGINE | fingerprint, PROVENANCE, None)


KERNEL = {
    "schema_version": 1,
    "evidence": "measured-kernel",
    "fingerprint": {
        k: ENGINE[k] for k in ("device_name", "torch_version", "triton_version", "cuda_version")
    },
    "provenance": PROVENANCE,
    "checkpoint": [
        {"state_bytes": 10**6, "p20_us": 4.0, "p50_us": 5.0, "p80_us": 6.0, "repeats": 9},
        {"state_bytes": 3 * 10**6, "p20_us": 8.0, "p50_us": 9.0, "p80_us": 9.0, "repeats": 9},
    ],
}


@pytest.fixture(scope="module")
def table() -> Table:
    return make_table()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A search path of one folder and nothing of this machine's user."""
    monkeypatch.setenv("CHUNK_PLANNER_TABLES", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def test_a_table_read_back_is_the_table_written(table: Table, tmp_path: Path) -> None:
    path = table.write(tmp_path)
    assert path.name == (
        "model=GLM-5.3-Flash,tp=8,kv=fp8,block=1152,device_name=NVIDIA_H100_80GB_HBM3.json"
    )
    assert load_table(path).data == table.data
    assert load_table(path).cost.step_us([(1152, 0)], [100]) == table.cost.step_us(
        [(1152, 0)], [100]
    )
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "no scratch file is left"


def test_a_failed_write_leaves_the_old_table(table: Table, tmp_path: Path, monkeypatch) -> None:
    path = table.write(tmp_path)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlannerError, match="No space left on device"):
        make_table(scale=2).write(tmp_path)
    assert load_table(path).data == table.data
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def broken(path: list, value: object):
    """The table with one value replaced; `...` removes it."""

    def change(data: dict) -> dict:
        data = copy.deepcopy(data)
        at = data
        for key in path[:-1]:
            at = at[key]
        if value is ...:
            del at[path[-1]]
        else:
            at[path[-1]] = value
        return data

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (broken(["schema_version"], 2), r"schema_version is 2; this release reads 1"),
        (broken(["schema_version"], True), r"schema_version is True"),
        (broken(["evidence"], "guessed"), r"evidence is 'guessed'"),
        (broken(["evidence"], ["x"]), r"evidence is"),
        (broken(["points"], ...), r"'points' is a required property"),
        (broken(["points", 3, "p20_us"], -1.0), r"points\[3\].p20_us: -1.0 is less than"),
        (broken(["points", 3, "p20_us"], "1"), r"points\[3\].p20_us: '1' is not of type"),
        (broken(["points", 3, "p20_us"], math.inf), r"points\[3\].p20_us: inf is greater than"),
        (broken(["points", 3, "p20_us"], 1e9), r"points\[3\]: p20_us, p50_us, p80_us do not rise"),
        (broken(["points", 0, "prefill_tokens"], [[5, 0, 0]]), r"points\[0\].prefill_tokens\[0\]"),
        (broken(["points", 0, "decode_kv_tokens"], [1] * 999), r"points\[1\]: not sorted by size"),
        (broken(["points", 0, "decode_kv_tokens"], []), r"points\[0\]: nothing is scheduled"),
        (broken(["fit", "knots_tokens", 0], 10**6), r"fit.knots_tokens: not strictly rising"),
        (broken(["fit", "knots_us", 0], 1e11), r"fit.knots_us: falls"),
        (broken(["fit", "knots_us"], [1.0, 2.0]), r"fit.knots_us: 2 values for"),
        (broken(["fingerprint", "extra"], 1), r"fingerprint: .*'extra'"),
        (broken(["fingerprint", "device_count"], 0), r"fingerprint.device_count: 0 is less than"),
    ],
)
def test_each_wrong_field_is_named(table: Table, change, says: str, tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match=says) as caught:
        check(change(table.data), tmp_path / "t.json")
    assert str(caught.value).startswith(str(tmp_path / "t.json"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a table"),
        (b"[]", "a list, not an object"),
        (b"\xff\xfe\x00", "not a table"),
        (b'{"schema_version": NaN}', "NaN is not a number"),
        (b'{"schema_version": -Infinity}', "-Infinity is not a number"),
        (b"[" * 100_000, "not a table"),
        (b'{"schema_version": ' + b"9" * 5000 + b"}", "not a table"),
        (b"PK\x03\x04" + bytes(100), "not a table"),
    ],
)
def test_files_that_are_no_tables(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(PlannerError, match=f"{says}.*; measure again with 'chunk-planner cal"):
        load_table(path)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(PlannerError, match="too large"):
        load_table(path)
    with pytest.raises(PlannerError, match="cannot be read"):
        load_table(tmp_path)
    with pytest.raises(PlannerError, match=r"cannot be read: No such file.*tables list"):
        load_table(tmp_path / "none.json")


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(data=st.data())
def test_fuzzed_files_are_one_clear_error(table: Table, folder: Path, data) -> None:
    """Truncated, with bytes flipped, or with any JSON value put in place of any other."""
    text = json.dumps(table.data).encode()
    kind = data.draw(st.sampled_from(["truncated", "bytes", "value", "noise"]))
    if kind == "truncated":
        text = text[: data.draw(st.integers(0, len(text) - 1))]
    elif kind == "bytes":
        at = data.draw(st.integers(0, len(text) - 1))
        text = text[:at] + data.draw(st.binary(min_size=1, max_size=8)) + text[at + 1 :]
    elif kind == "noise":
        text = data.draw(st.binary(max_size=300))
    else:
        document = copy.deepcopy(table.data)
        at, keys = document, []
        while isinstance(at, (dict, list)) and at and data.draw(st.booleans()) | (len(keys) < 1):
            keys.append(
                data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            )
            parent, at = at, at[keys[-1]]
        parent[keys[-1]] = data.draw(
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(st.text(max_size=5), inner, max_size=3)
                ),
                max_leaves=4,
            )
        )
        text = json.dumps(document).encode()
    path = folder / "fuzzed.json"
    path.write_bytes(text)
    problem = None
    try:
        assert load_table(path).cost.max_tokens > 0
    except PlannerError as error:
        problem = str(error)
    if problem is not None:
        assert problem.startswith(str(path))
        assert "\n" not in problem
        assert len(problem) < 600
    found = find(ENGINE)  # what the engine does at its start: never raises
    assert found.table is not None or found.refused


def test_the_engines_own_table_is_found(table: Table, folder: Path) -> None:
    make_table(device_name="NVIDIA A100").write(folder)
    make_table(tensor_parallel_size=4).write(folder)
    (folder / "broken.json").write_text("{")
    exact = table.write(folder)
    make_table(block_size=1088).write(folder)
    found = find(ENGINE)
    assert found.table.path == exact
    assert found.soft == []
    assert str(exact) in found.text
    assert sorted(Path(name).name[:6] for name in found.refused) == ["broken", "model=", "model="]


def test_soft_differences_are_used_and_said(folder: Path) -> None:
    make_table(block_size=1088, vllm_version="0.32.1").write(folder)
    found = find(ENGINE)
    assert found.table is not None
    assert "block_size is 1152, the table's is 1088" in found.text
    assert "vllm_version is 0.32.0, the table's is 0.32.1" in found.text
    drafting = find(ENGINE | {"speculative_decoding": "mtp 3"})
    assert "speculative_decoding is mtp 3, the table's is none" in drafting.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device_name", "NVIDIA H200"),
        ("device_count", 4),
        ("tensor_parallel_size", 4),
        ("expert_parallel", False),
        ("geometry_hash", "f" * 16),
        ("weight_dtype", "fp8"),
        ("kv_cache_dtype", "auto"),
        ("state_dtype", "bfloat16"),
        ("attention_backend", "FLASHINFER"),
        ("linear_attention_backend", "flashinfer"),
        ("enforce_eager", True),
    ],
)
def test_hard_differences_are_refused_with_the_reason(folder: Path, field: str, value) -> None:
    make_table(**{field: value}).write(folder)
    found = find(ENGINE)
    assert found.table is None
    assert f"{field} is {ENGINE[field]}, the table's is {value}" in found.text


def test_nothing_found_says_where_it_looked(folder: Path) -> None:
    assert str(folder) in find(ENGINE).text
    assert find(ENGINE).table is None


def test_a_kernel_table_prices_checkpoints_and_never_a_step(table: Table, folder: Path) -> None:
    kernels = check(KERNEL)
    assert kernels.checkpoint_us(2 * 10**6) == pytest.approx(7.0)
    assert kernels.checkpoint_us(3 * 10**6) == 9.0
    with pytest.raises(PlannerError, match="was not measured"):
        kernels.checkpoint_us(10**5)
    with pytest.raises(PlannerError, match="not steps"):
        _ = kernels.cost
    with pytest.raises(PlannerError, match="not state checkpoints"):
        table.checkpoint_us(10**6)
    kernels.write(folder)
    assert find(ENGINE).table is None
    assert find(ENGINE, evidence="measured-kernel").table is not None
    unsorted = broken(["checkpoint", 1, "state_bytes"], 10**6)(KERNEL)
    with pytest.raises(PlannerError, match=r"checkpoint\[1\]: not sorted by size"):
        check(unsorted)


def test_merging_pools_repeats_and_refuses_another_engine(table: Table) -> None:
    both = merge(table, make_table(scale=1.5))
    first, pooled = table.points[0], both.points[0]
    assert pooled.repeats == 2 * first.repeats
    assert pooled.p20_us == pytest.approx(1.25 * first.p20_us, rel=1e-3)
    with pytest.raises(PlannerError, match="not of the same engine: tensor_parallel_size"):
        merge(table, make_table(tensor_parallel_size=4))


def test_the_commands(table: Table, folder: Path, capsys: pytest.CaptureFixture) -> None:
    path = table.write(folder)
    bad = folder / "bad.json"
    bad.write_text("{}")
    assert main(["tables", "check", str(path)]) == 0
    assert main(["tables", "check", "--json", str(path), str(bad)]) == 1
    out = capsys.readouterr().out
    results = json.loads(out[out.index("[") :])
    assert [result["ok"] for result in results] == [True, False]
    assert main(["tables", "list", "--json"]) == 0
    listed = {Path(row["path"]).name: row for row in json.loads(capsys.readouterr().out)}
    assert listed[path.name]["model"] == "GLM-5.3-Flash"
    assert "schema_version" in listed["bad.json"]["error"]
    assert main(["tables", "show", str(path)]) == 0
    assert "measured-engine" in capsys.readouterr().out
    other = make_table(scale=2, vllm_version="0.33.0").write(folder / "other.json")
    assert main(["tables", "diff", "--json", str(path), str(other)]) == 0
    diff = json.loads(capsys.readouterr().out)
    assert all(step["ratio"] == pytest.approx(2, rel=0.01) for step in diff["steps"])
    assert diff["versions"] == ["vllm_version is 0.33.0, the table's is 0.32.0"]
    assert main(["tables", "merge", str(path), str(path), "--output", str(folder / "m.json")]) == 0
    assert load_table(folder / "m.json").points
    assert main(["tables", "show", str(bad)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("org/Model-8B", "Model-8B"),
        ("/models/Model-8B/", "Model-8B"),
        (".", "here"),
        ("/hub/models--org--Model-8B/snapshots/0123abcd", "Model-8B"),
        ("/", "unnamed"),
    ],
)
def test_every_model_has_a_name(
    model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert model_name(model) == name


@pytest.mark.parametrize("model", [".", "../My Model", "config.json", "org/My Model"])
def test_recommend_finds_the_table_of_a_model_by_its_name(
    model: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from chunk_planner.cli.table_choice import table_for_model

    written = make_table(model="My Model").write(folder)
    (folder / "My Model").mkdir()
    monkeypatch.chdir(folder / "My Model")
    assert table_for_model(model, 8, 1152).table.path == written
    assert table_for_model("Another", 8, 1152).table is None
