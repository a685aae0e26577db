"""The chunk lists made by the kernel against those the engine builds, step by step.

A CPU engine uses the same metadata builders as a GPU one. Each family is served by a real engine in
a process of its own, with the option on: the plugin installs the lists, the engine runs on them,
and beside every call the engine's own builder is asked as well.
"""

import json
import logging
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.engine
torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from chunk_planner.engine.tiny_model import TINY_ENGINE_ENV, write_tiny_model  # noqa: E402

BLOCKS = {"qwen3-next": 1152, "granite-4": 384}

SERVE_AND_COMPARE = """
import json, sys
import torch
from vllm import LLM, SamplingParams
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from chunk_planner.engine import plugin, tiny_model

model, family, block, out = sys.argv[1:]
builder, name = {
    "qwen3-next": (GDNAttentionMetadataBuilder, "_build_chunk_metadata"),
    "granite-4": (Mamba2AttentionMetadataBuilder, "_build_chunk_metadata_tensors"),
}[family]
engines_own = getattr(builder, name)
plugin.register()
ours = getattr(builder, name)
assert ours is not engines_own  # the plugin has installed its lists
calls = []

def both(self, *args):
    made, built = ours(self, *args), engines_own(self, *args)
    for left, right in zip(made, built, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            assert left.dtype == right.dtype and left.shape == right.shape, (left, right)
            assert torch.equal(left, right), (left, right)
    calls.append(len(made[0]))
    return made

setattr(builder, name, both)
if family == "granite-4":
    tiny_model.keep_mamba2_without_checkpoints()
llm = LLM(model=model, max_model_len=8192, max_num_batched_tokens=2 * int(block) + 64,
          max_num_seqs=8, **tiny_model.tiny_engine_args(int(block)))
# Prompts below, at and above the block: mixed steps, chunks from mid-prompt, a shared prefix.
sizes = [int(block) * 4 + 100, 17, int(block), 300, int(block) * 2 + 1, 65]
prompts = [{"prompt_token_ids": [(7 * i + t) % 500 + 2 for t in range(n)]}
           for i, n in enumerate(sizes)]
prompts.append({"prompt_token_ids": [*prompts[0]["prompt_token_ids"], *range(2, 90)]})
params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, detokenize=False)
tokens = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
json.dump({"calls": calls, "tokens": tokens}, open(out, "w"))
"""


@pytest.mark.parametrize("family", BLOCKS)
def test_every_step_of_an_engine(family: str, tmp_path) -> None:
    model = write_tiny_model(tmp_path / "model", family)
    script, out = tmp_path / "serve.py", tmp_path / "out.json"
    script.write_text(SERVE_AND_COMPARE)
    environment = {
        **os.environ,
        **TINY_ENGINE_ENV,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "CHUNK_PLANNER_GPU_METADATA": "1",
        "TRITON_INTERPRET": "1",
    }
    done = subprocess.run(
        [sys.executable, str(script), str(model), family, str(BLOCKS[family]), str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(out.read_text())
    assert len(result["calls"]) >= 5
    assert max(result["calls"]) > 2
    assert [len(tokens) for tokens in result["tokens"]] == [6] * 7


def test_mamba2_lists_with_checkpoints() -> None:
    """What a CPU engine cannot run: an internal checkpoint, and decodes ahead of the prefills."""
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder

    from chunk_planner.engine.gpu_metadata import mamba2_lists

    rng = random.Random(1)
    for _ in range(100):
        decodes, prefills = rng.randint(0, 5), rng.randint(1, 6)
        query_lens = [1] * decodes + [rng.randint(1, 1200) for _ in range(prefills)]
        computed = [rng.randint(1, 5000) for _ in range(decodes)]
        computed += [rng.choice([0, rng.randint(0, 5000)]) for _ in range(prefills)]
        offsets = [rng.choice([0, rng.randrange(size)]) for size in query_lens[decodes:]]
        offsets = rng.choice([None, offsets])
        query_start_loc = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        seq_lens = torch.tensor([c + q for c, q in zip(computed, query_lens, strict=True)])
        batch = SimpleNamespace(
            num_reqs=decodes + prefills,
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens_cpu_upper_bound=seq_lens.to(torch.int32),
            compute_num_computed_tokens=lambda c=computed: torch.tensor(c, dtype=torch.int32),
        )
        common = SimpleNamespace(
            num_prefills=prefills, num_reqs=decodes + prefills, num_decode_tokens=decodes
        )
        builder = object.__new__(Mamba2AttentionMetadataBuilder)
        built = builder._build_chunk_metadata_tensors(256, common, batch, offsets)
        for left, right in zip(mamba2_lists(256, prefills, batch, offsets), built, strict=True):
            if right is None:
                assert left is None
            else:
                assert left.dtype == right.dtype
                assert left.tolist() == right.tolist()


def test_an_unknown_release_is_left_alone(monkeypatch, caplog) -> None:
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    from chunk_planner.engine import gpu_metadata

    before = GDNAttentionMetadataBuilder._build_chunk_metadata
    monkeypatch.setattr(gpu_metadata.vllm, "__version__", "0.99.0")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        assert gpu_metadata.install() is False
    assert GDNAttentionMetadataBuilder._build_chunk_metadata is before
    (record,) = caplog.records
    assert "CHUNK_PLANNER_GPU_METADATA is ignored" in record.getMessage()
    assert "0.99.0" in record.getMessage()


def test_a_failing_list_falls_back_to_the_engines_own(monkeypatch, caplog) -> None:
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    from chunk_planner.engine import gpu_metadata, plugin

    def broken(*args):
        raise RuntimeError("made to fail")

    engines_own = GDNAttentionMetadataBuilder._build_chunk_metadata
    monkeypatch.setattr(GDNAttentionMetadataBuilder, "_build_chunk_metadata", engines_own)
    mamba2 = gpu_metadata.Mamba2AttentionMetadataBuilder
    monkeypatch.setattr(
        mamba2, "_build_chunk_metadata_tensors", mamba2._build_chunk_metadata_tensors
    )
    monkeypatch.setattr(gpu_metadata, "gdn_lists", broken)
    monkeypatch.setattr(plugin, "_failed", False)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    assert gpu_metadata.install() is True
    builder = object.__new__(GDNAttentionMetadataBuilder)
    builder.gdn_prefill_backend = "triton"
    query_start_loc = torch.tensor([0, 100, 300], dtype=torch.int32)
    arguments = (query_start_loc, query_start_loc, torch.device("cpu"))
    expected = engines_own(builder, *arguments)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            made = builder._build_chunk_metadata(*arguments)
            assert [t.tolist() for t in made] == [t.tolist() for t in expected]
    assert [r.getMessage() for r in caplog.records if "made to fail" in r.getMessage()] == [
        "Chunk Planner steps aside, the engine is not affected: RuntimeError: made to fail"
    ]
