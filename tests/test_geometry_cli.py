"""`chunk-planner block-size` and `memory`, as a user types them."""

import json

import pytest

from chunk_planner.cli import main

SEED = ["--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8", "--num-speculative-tokens", "3"]
FIELDS = {
    "block_size",
    "padding_percent",
    "grid_tokens",
    "attention_bytes_per_token",
    "conv_bytes",
    "recurrent_bytes",
    "state_bytes_per_layer",
    "mamba_layers",
    "attention_layers",
    "checkpoint_bytes",
    "kv_bytes_per_token",
    "family",
    "vllm_version",
    "notes",
}


def test_block_size_json(capsys):
    assert main(["block-size", "GLM-5.3-Flash", *SEED, "--vllm-version", "0.31", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) >= FIELDS
    assert (found["block_size"], found["padding_percent"]) == (1152, 5.11)
    assert (found["grid_tokens"], found["attention_bytes_per_token"]) == (128, 512)
    assert found["conv_bytes"] + found["recurrent_bytes"] == found["state_bytes_per_layer"]
    assert found["checkpoint_bytes"] == 34 * 561152
    assert found["kv_bytes_per_token"] == 11 * 512


def test_block_size_explains_its_arithmetic(capsys):
    assert main(["block-size", "zai-org/GLM-5.3-Flash", *SEED, "--explain"]) == 0
    out = capsys.readouterr().out
    assert "block size 1152 tokens" in out
    assert "64/8 heads x 128 x 128 x 4 B (float32) = 524288 B" in out
    assert "561152 / 512 = 1096.00" in out
    assert "1096.00 rounded up to 128 = 1152 tokens" in out


def test_speculative_config_is_vllms(capsys):
    config = '{"method": "mtp", "num_speculative_tokens": 3}'
    flags = ["block-size", "Qwen3.5-27B", "--speculative-config", config, "--json"]
    assert main([*flags, "--vllm-version", "0.32"]) == 0
    assert json.loads(capsys.readouterr().out)["block_size"] == 800
    assert main([*flags, "--num-speculative-tokens", "2"]) == 2
    assert "contradicts" in capsys.readouterr().err


def test_underscores_and_short_flags(capsys):
    assert main(["block-size", "Qwen3.5-27B", "--kv_cache_dtype=fp8", "-tp", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_cache_dtype"] == "fp8"


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ('{"architectures": ["LlamaForCausalLM"]}', [], "full attention, no recurrent state"),
        ('{"architectures": ["Qwen3', [], "not valid JSON"),
        (None, [], "no config.json in this folder"),
    ],
)
def test_bad_models_are_one_sentence(tmp_path, capsys, text, flags, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert main(["block-size", str(tmp_path), *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_tensor_parallel_size_that_does_not_divide(capsys):
    assert main(["block-size", "GLM-5.3-Flash", "--tensor-parallel-size", "3"]) == 2
    assert "tensor_parallel_size = 3 does not divide" in capsys.readouterr().err


def test_memory(capsys):
    flags = [
        "--gpu-memory",
        "64GiB",
        "--gpu-memory-utilization",
        "0.9",
        "--max-model-len",
        "1048576",
    ]
    budgets = "2048,4096,8192,12288,16384"
    command = ["memory", "GLM-5.3-Flash", *SEED, *flags, "--max-num-batched-tokens", budgets]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["max_num_batched_tokens"] for row in found["budgets"]] == [
        2048, 4096, 8192, 12288, 16384,
    ]  # fmt: skip
    assert found["default_budget"]["max_num_batched_tokens"] == 2048
    assert all(row["evidence"] == "modelled" and row["formula"] for row in found["budgets"])
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "modelled" in out
    assert "12288" in out


def test_memory_starts_from_vllms_default_budget(capsys):
    assert main(["memory", "Qwen3.5-27B", "--gpu-memory", "80GiB", "--device-name", "H100"]) == 0
    out = capsys.readouterr().out
    assert "8192" in out
    assert "default for server" in out


@pytest.mark.parametrize("size", ["lots", "64 parsecs", ""])
def test_memory_sizes(capsys, size):
    with pytest.raises(SystemExit) as stop:
        main(["memory", "Qwen3.5-27B", "--gpu-memory", size])
    assert stop.value.code == 2
    assert "is not a size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"method": "mtp"}', "num_speculative_tokens is missing"),
        ('{"num_speculative_tokens": 3}', "method is missing"),
        ("{}", "method is missing"),
        ('{"method": "mtp", "num_speculative_tokens": 0}', "must be a whole number of at least 1"),
        ('{"method": "mtp", "num_speculative_tokens": "3"}', "must be a whole number"),
        ('{"method": 5, "num_speculative_tokens": 3}', "speculative_method = 5 is not one of"),
        ('{"method": "x", "num_speculative_tokens": 3}', "speculative_method = 'x' is not one of"),
    ],
)
@pytest.mark.parametrize("command", ["block-size", "recommend"])
def test_a_speculative_config_that_says_too_little_is_refused(capsys, command, config, said):
    budget = ["--max-num-batched-tokens", "2048"] if command == "recommend" else []
    assert main([command, "Qwen3.5-27B", *budget, "--speculative-config", config]) == 2
    assert said in capsys.readouterr().err


def test_an_mtp_head_under_its_models_own_name_keeps_kv_too(capsys):
    argv = ["memory", "Qwen3.5-27B", "--gpu-memory", "80GiB", "--json", "--speculative-config"]

    def budgets(method):
        config = json.dumps({"method": method, "num_speculative_tokens": 3})
        assert main([*argv, config]) == 0
        return json.loads(capsys.readouterr().out)["budgets"]

    assert budgets("qwen3_5_mtp") == budgets("mtp") != budgets("ngram")


def test_switches_of_the_drafter_reach_the_rule(capsys):
    argv = ["recommend", "Qwen3.5-27B", "--max-num-batched-tokens", "2048", "--json"]

    def headroom(**switches):
        config = {"method": "eagle3", "num_speculative_tokens": 3, **switches}
        assert main([*argv, "--speculative-config", json.dumps(config)]) == 0
        candidates = json.loads(capsys.readouterr().out)["candidates"]
        return next(one["headroom_tokens"] for one in candidates if one["blocks"] == 3)

    # P-EAGLE takes k - 1 slots of each of 64 decodes and of the prefill.
    assert headroom(parallel_drafting=True) - headroom() == 2 * 65


def test_memory_takes_no_zero_sequences(capsys):
    argv = ["memory", "Qwen3.5-27B", "--gpu-memory", "80GiB", "--max-num-seqs", "0"]
    assert main(argv) == 2
    assert "max_num_seqs = 0 must be at least 1" in capsys.readouterr().err


def test_ranks_that_cannot_share_the_context_are_refused(capsys):
    argv = ["block-size", "Qwen3.5-27B", "-tp", "4", "--decode-context-parallel-size"]
    assert main([*argv, "2"]) == 0
    assert main([*argv, "3"]) == 2
    said = "decode_context_parallel_size = 3 must divide tensor_parallel_size = 4"
    assert said in capsys.readouterr().err


def test_a_home_that_is_not_there_is_refused(capsys):
    assert main(["block-size", "~no-such-user-here/model"]) == 2
    said = capsys.readouterr().err
    assert "~no-such-user-here/model: no such file or folder; give a folder with config" in said
