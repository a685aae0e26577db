"""The command line: answers, JSON, and one-sentence refusals with exit code 2."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest

from chunk_planner import cli

PLAN = ["plan", "--block-size", "1152", "--prompt-tokens", "20000", "--json"]


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert cli.main(argv) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    try:
        code = cli.main(argv)
    except SystemExit as stop:
        code = stop.code
    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert len(shown.err.strip().splitlines()) == 1
    return shown.err


@pytest.mark.parametrize(
    ("budget", "chunks"),
    [
        (2048, [1152] * 17 + [416]),
        (3072, [2304] * 8 + [1152, 416]),
        (4096, [3456] * 5 + [2304, 416]),
        (6144, [5760] * 3 + [2304, 416]),
        (8192, [8064] * 2 + [3456, 416]),
    ],
)
def test_plan_prints_the_schedulers_chunks(capsys, budget, chunks):
    found = answer(capsys, *PLAN, "--max-num-batched-tokens", str(budget))
    assert found["chunks"] == chunks
    assert found["steps"] == len(chunks)
    assert found["idle_share"] == pytest.approx(1 - max(chunks) / budget)
    assert found["stalled"] is None
    assert found["vllm_version"] == "0.33"


def test_plan_of_a_block_larger_than_the_budget_alternates(capsys):
    argv = "plan --block-size 2096 --max-num-batched-tokens 2048 --prompt-tokens 20000 --json"
    found = answer(capsys, *argv.split())
    assert found["chunks"][:6] == [2048, 48] * 3
    assert found["tokens_per_step"] == 1048


def test_plan_text_names_its_source_and_units(capsys):
    argv = "plan --block-size 1152 --max-num-batched-tokens 2048 --prompt-tokens 20000"
    assert cli.main(argv.split()) == 0
    shown = capsys.readouterr().out
    assert "1152 x 17, 416" in shown
    assert "43.8 %" in shown
    assert "rule" in shown


def test_recommend_answers_the_reported_case(capsys):
    argv = "recommend --block-size 1152 --max-num-batched-tokens 2048 --max-num-seqs 16"
    found = answer(capsys, *argv.split(), "--num-speculative-tokens", "3", "--json")
    assert found["evidence"] == "rule"
    assert found["expected_decodes"] == 16
    assert found["current"]["idle_share"] == pytest.approx(0.4375)
    assert found["recommended"]["max_num_batched_tokens"] == 2880
    assert found["recommended"]["blocks"] == 2
    assert found["recommended"]["headroom_tokens"] == 64
    assert found["recommended"]["lane_tokens"] == 512
    assert any("rule-only" in reason for reason in found["reasons"])
    assert any("D = 16" in reason for reason in found["reasons"])


def test_recommend_text_is_a_table_and_sentences(capsys):
    argv = "recommend --block-size 1152 --max-num-batched-tokens 2048 --max-num-seqs 16"
    assert cli.main(argv.split()) == 0
    shown = capsys.readouterr().out
    assert "evidence: rule" in shown
    assert "--max-num-batched-tokens 2" in shown


def test_lmcache_is_a_connector_however_it_is_named(capsys):
    # With a connector vLLM 0.33 hashes no lookahead, so MTP drops a block: the tail merges.
    argv = ["recommend", "Qwen3.5-27B", "--max-num-batched-tokens", "1000", "--vllm-version"]
    argv += ["0.33", "--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}']
    argv += ["--gdn-prefill-backend", "triton", "--prompt-tokens", "20100", "--max-num-seqs", "16"]
    named = answer(
        capsys, *argv, "--json", "--kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1"}'
    )
    assert answer(capsys, *argv, "--json", "--lmcache") == named


def test_recommend_tells_notes_about_the_model_from_reasons(capsys):
    argv = ["recommend", "Qwen3.5-27B", "--max-num-batched-tokens", "2048"]
    note = "recurrent state in float32, from the config's mamba_ssm_dtype"
    assert cli.main(argv) == 0
    assert f"\nnote: {note}\n" in capsys.readouterr().out
    found = answer(capsys, *argv, "--json")
    assert note in found["notes"]
    assert all(reason[0].isupper() and reason.endswith(".") for reason in found["reasons"])


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_terminal_cuts_no_number(capsys, monkeypatch, width):
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": str(width)}.items():
        monkeypatch.setenv(name, value)
    argv = "recommend Qwen3.5-27B --max-num-batched-tokens 2048 --gpu-memory 80GiB"
    assert cli.main(argv.split()) == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    table = shown[: shown.index("Keep")].splitlines()
    assert all(len(line) <= width for line in table)
    assert "…" not in shown
    for cells in (["16128", "20", "15680"], ["the KV cache left does not hold 262144 tokens"]):
        assert any(all(cell in line for cell in cells) for line in table)


def test_a_piped_table_has_one_line_a_budget(capsys):
    argv = "recommend Qwen3.5-27B --max-num-batched-tokens 2048 --gpu-memory 80GiB"
    assert cli.main(argv.split()) == 0
    table = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert "checkpoint every (tokens)" in table[1]
    assert all(re.match(r"(keep)? +\d+ ", line) for line in table[2:])


def test_flags_take_vllms_spellings(capsys):
    argv = "plan --block_size=1152 --max_num_batched_tokens=2K --prompt_tokens 20k --json"
    assert answer(capsys, *argv.split())["chunks"] == [1152] * 17 + [416]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("plan --block-size 0 --max-num-batched-tokens 2048 --prompt-tokens 9", "block_size = 0"),
        ("plan --block-size 16 --max-num-batched-tokens -1 --prompt-tokens 9", "= -1"),
        ("plan --block-size 16 --max-num-batched-tokens 64 --prompt-tokens -9", "-9"),
        ("plan --block-size x --max-num-batched-tokens 64 --prompt-tokens 9", "'x'"),
        ("plan --block-size 16 --max-num-batched-tokens 64", "--prompt-tokens"),
        (
            "plan --block-size 16 --max-num-batched-tokens 64 --prompt-tokens 9 --vllm-version 0.9",
            "'0.9' is not supported",
        ),
        ("recommend --block-size 16 --max-num-batched-tokens 64 --max-num-seqs 0", "max_num_seqs"),
        (
            "recommend --block-size 16 --max-num-batched-tokens 64 --max-num-seqs 4 "
            "--expected-decodes 5",
            "expected_decodes = 5",
        ),
        (
            "recommend --block-size 16 --max-num-batched-tokens 64 --prompt-tokens 0",
            "num_prompt_tokens = 0 must be at least 1",
        ),
        (
            "recommend --block-size 16 --max-num-batched-tokens 64 --max-model-len 0",
            "max_model_len = 0 must be above 0",
        ),
        (
            "recommend --block-size 16 --max-num-batched-tokens 64 --slo-itl-ms 0",
            "slo_itl_ms = 0.0 must be above 0",
        ),
        (
            "recommend --block-size 16 --max-num-batched-tokens 64 --tensor-parallel-size 2 "
            "--gpu-memory 80GB",
            "--tensor-parallel-size, --gpu-memory: says something about a model only; give MODEL",
        ),
        (
            "recommend --block-size 16 --max-num-batched-tokens 64 --max-num-scheduled-tokens 65",
            "--max-num-scheduled-tokens 65 is above --max-num-batched-tokens 64",
        ),
        (
            "plan --block-size 16 --max-num-batched-tokens 64 --prompt-tokens 3000000000",
            "'3000000000' is above 2147483647",
        ),
        ("no-such-command", "no-such-command"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, argv, said):
    assert said in refusal(capsys, *argv.split())


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_explains_itself(capsys, name):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"chunk-planner {name}" in capsys.readouterr().out


def test_plan_loads_no_table_library():
    code = (
        "import sys; from chunk_planner.cli import main; "
        f"main({[*PLAN, '--max-num-batched-tokens', '2048']!r}); "
        "print([m for m in ('rich', 'jsonschema', 'torch', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


@pytest.mark.parametrize("missing", ["vllm", "scipy"])
def test_calibrate_says_what_it_needs_before_it_measures(capsys, monkeypatch, missing):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    error = refusal(capsys, "calibrate", "some-model")
    assert f"{missing} is not installed" in error
    assert "chunk-planner[engine]" in error


def test_underscores_are_dashes_in_flags_but_not_in_their_keys():
    from chunk_planner.cli import _as_dashes

    given = ["--max_num_seqs=4", "--compilation_config.cudagraph_mode=NO_NE", "a_b", "-O.x_y=1"]
    assert _as_dashes(given) == [
        "--max-num-seqs=4",
        "--compilation-config.cudagraph_mode=NO_NE",
        "a_b",
        "-O.x_y=1",
    ]
