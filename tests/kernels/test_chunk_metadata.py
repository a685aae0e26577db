"""The chunk lists against their reference and against the code of vLLM they replace."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from chunk_planner.kernels.chunk_metadata import (  # noqa: E402
    ChunkMetadata,
    chunk_metadata,
    chunk_metadata_reference,
    count_chunks,
    max_chunks,
)

LISTS = (
    "chunk_indices",
    "chunk_offsets",
    "cu_chunk_seqlens",
    "seq_idx",
    "last_chunk_indices",
    "checkpoint_chunk_indices",
)


def random_batch(seed: int, num_seqs: int, longest: int, empty: bool = False):
    """query_start_loc, num_computed_tokens, checkpoint_offsets of a random batch (on the CPU)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (num_seqs,), generator=generator, dtype=torch.int32)

    num_tokens = draw(0 if empty else 1, longest + 1)
    computed = draw(0, 5000) * draw(0, 2)
    checkpoints = (draw(0, 2**30) % num_tokens.clamp(min=1)) * draw(0, 2)
    return torch.cat([torch.zeros(1), num_tokens.cumsum(0)]).to(torch.int32), computed, checkpoints


def empty_lists(
    device: str, num_seqs: int, room: int, dtype=torch.int32, only: tuple[str, ...] = LISTS
) -> ChunkMetadata:
    shapes = {
        "chunk_indices": (room, 2),
        "chunk_offsets": (num_seqs + 1,),
        "cu_chunk_seqlens": (room + 1,),
        "seq_idx": (room,),
        "last_chunk_indices": (num_seqs,),
        "checkpoint_chunk_indices": (num_seqs,),
    }
    poison = torch.iinfo(dtype).min
    return ChunkMetadata(
        **{name: torch.full(shapes[name], poison, dtype=dtype, device=device) for name in only}
    )


def assert_lists_equal(actual: ChunkMetadata, expected: ChunkMetadata) -> None:
    for name in LISTS:
        left, right = getattr(actual, name), getattr(expected, name)
        assert (left is None) == (right is None), name
        if left is not None:
            torch.testing.assert_close(
                left, right, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize(
    ("num_seqs", "longest", "chunk_size", "inputs"),
    [
        (0, 1, 64, "plain"),
        (1, 1, 64, "plain"),
        (1, 20_000, 64, "plain"),
        (7, 1151, 64, "plain"),
        (7, 1151, 16, "plain"),
        (7, 1151, 63, "plain"),
        (7, 1151, 256, "computed"),
        (7, 1151, 63, "checkpoints"),
        (24, 2096, 256, "checkpoints"),
    ],
)
def test_kernel_matches_reference(
    num_seqs: int, longest: int, chunk_size: int, inputs: str, device: str
) -> None:
    qsl, computed, checkpoints = random_batch(num_seqs + chunk_size, num_seqs, longest, empty=True)
    room = max_chunks(int(qsl[-1]), num_seqs, chunk_size, int((checkpoints > 0).sum()))
    arguments = {"num_computed_tokens": None, "checkpoint_offsets": None}
    if inputs != "plain":
        arguments["num_computed_tokens"] = computed.to(device)
    if inputs == "checkpoints":
        arguments["checkpoint_offsets"] = checkpoints.to(device)
    qsl = qsl.to(device)
    actual, expected = (
        run(qsl, chunk_size, empty_lists(device, num_seqs, room), **arguments)
        for run in (chunk_metadata, chunk_metadata_reference)
    )
    assert_lists_equal(actual, expected)


def test_more_sequences_than_a_program_reads_at_a_time(monkeypatch, device: str) -> None:
    # 1040 sequences are as many programs: half a minute in the interpreter. 40 of 16 do the same.
    monkeypatch.setattr("chunk_planner.kernels.chunk_metadata.BLOCK_SEQS", 16)
    qsl, _, _ = random_batch(4, 40, 90)
    room = max_chunks(int(qsl[-1]), 40, 64)
    actual, expected = (
        run(qsl.to(device), 64, empty_lists(device, 40, room))
        for run in (chunk_metadata, chunk_metadata_reference)
    )
    assert_lists_equal(actual, expected)


def test_room_is_counted_and_bounded() -> None:
    for seed in range(200):
        qsl, computed, checkpoints = random_batch(seed, 1 + seed % 9, 900, empty=True)
        num_seqs, size = len(qsl) - 1, 64
        for inputs in ((), (computed,), (computed, checkpoints)):
            out = empty_lists("cpu", num_seqs, 1, only=("chunk_offsets",))
            chunk_metadata_reference(qsl, size, out, *inputs)
            made = int(out.chunk_offsets[-1])
            assert count_chunks(qsl, size, *inputs) == made
            stops = int((checkpoints > 0).sum()) if len(inputs) > 1 else 0
            assert made <= max_chunks(int(qsl[-1]), num_seqs, size, stops)


@pytest.mark.parametrize("run", [chunk_metadata, chunk_metadata_reference])
def test_known_batch(run, device: str) -> None:
    # 130 tokens from position 100 with a checkpoint at 200, then 64 tokens from 0.
    out = run(
        torch.tensor([5, 135, 199], dtype=torch.int32, device=device),
        64,
        empty_lists(device, 2, 8),
        num_computed_tokens=torch.tensor([100, 0], device=device),
        checkpoint_offsets=torch.tensor([100, 0], device=device),
    )
    # Chunk ends at 128, 192, the checkpoint 200 and the end 230; 230 < 256.
    assert out.cu_chunk_seqlens.tolist() == [0, 28, 92, 100, 130, 194, 194, 194, 194]
    assert out.seq_idx.tolist() == [0, 0, 0, 0, 1, -1, -1, -1]
    assert out.chunk_offsets.tolist() == [0, 4, 5]
    assert out.last_chunk_indices.tolist() == [3, 4]
    assert out.checkpoint_chunk_indices.tolist() == [2, -1]
    assert out.chunk_indices.tolist()[:6] == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [-1, -1]]


@pytest.mark.parametrize("run", [chunk_metadata, chunk_metadata_reference])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_only_the_lists_asked_for(run, dtype, device: str) -> None:
    qsl = torch.tensor([0, 100, 101], dtype=dtype, device=device)
    out = run(qsl, 64, empty_lists(device, 2, 3, dtype, only=("chunk_indices", "chunk_offsets")))
    assert out.chunk_indices.tolist() == [[0, 0], [0, 1], [1, 0]]
    assert out.chunk_offsets.tolist() == [0, 2, 3]


@pytest.mark.parametrize("run", [chunk_metadata, chunk_metadata_reference])
def test_chunks_beyond_the_room_are_dropped(run, device: str) -> None:
    qsl = torch.tensor([0, 1000, 2000], dtype=torch.int32, device=device)
    out = run(qsl, 64, empty_lists(device, 2, 20))
    assert out.chunk_offsets.tolist() == [0, 16, 32]
    assert out.seq_idx.tolist() == [0] * 16 + [1] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"query_start_loc": torch.zeros(2, 2, dtype=torch.int32)}, "sequences \\+ 1"),
        ({"query_start_loc": torch.zeros(3)}, "query_start_loc is torch.float32"),
        ({"num_computed_tokens": torch.zeros(3, dtype=torch.int32)}, "must be \\(2,\\)"),
        ({"checkpoint_offsets": torch.zeros(4, dtype=torch.int32)[::2]}, "not contiguous"),
        (
            {
                "out": ChunkMetadata(
                    seq_idx=torch.zeros(3, dtype=torch.int32),
                    chunk_indices=torch.zeros(4, 2, dtype=torch.int32),
                )
            },
            "room for \\[3, 4\\]",
        ),
    ],
)
def test_bad_arguments_are_named(change: dict, message: str) -> None:
    arguments = {
        "query_start_loc": torch.tensor([0, 5, 9], dtype=torch.int32),
        "chunk_size": 64,
        "out": ChunkMetadata(seq_idx=torch.zeros(4, dtype=torch.int32)),
    }
    with pytest.raises(ValueError, match=message):
        chunk_metadata(**{**arguments, **change})


@pytest.mark.engine
@pytest.mark.parametrize("num_seqs", [1, 5, 24])
def test_matches_flash_linear_attention_of_vllm(num_seqs: int, device: str) -> None:
    index = pytest.importorskip("vllm.third_party.flash_linear_attention.ops.index")
    for seed in range(3):
        qsl, _, _ = random_batch(seed, num_seqs, 700)
        indices = index.prepare_chunk_indices(qsl, 64)
        offsets = index.prepare_chunk_offsets(qsl, 64)
        out = empty_lists(device, num_seqs, len(indices), only=("chunk_indices", "chunk_offsets"))
        chunk_metadata(qsl.to(device), 64, out)
        assert out.chunk_indices.tolist() == indices.tolist()
        assert out.chunk_offsets.tolist() == offsets.tolist()


@pytest.mark.engine
@pytest.mark.parametrize("num_seqs", [1, 5, 24])
def test_matches_mamba2_builder_of_vllm(num_seqs: int, device: str) -> None:
    builder = pytest.importorskip("vllm.v1.attention.backends.mamba_attn")
    for seed in range(3):
        qsl, computed, checkpoints = random_batch(seed, num_seqs, 900)
        cu_chunk_seqlens, seq_idx, last, at_checkpoint = (
            builder.BaseMambaAttentionMetadataBuilder._compute_chunk_metadata(
                256, num_seqs, computed, qsl, checkpoints.tolist()
            )
        )
        out = chunk_metadata(
            qsl.to(device),
            256,
            empty_lists(device, num_seqs, len(seq_idx)),
            computed.to(device),
            checkpoints.to(device),
        )
        assert out.cu_chunk_seqlens.tolist() == cu_chunk_seqlens
        assert out.seq_idx.tolist() == seq_idx
        assert out.last_chunk_indices.tolist() == last
        assert out.checkpoint_chunk_indices.tolist() == at_checkpoint


@pytest.mark.engine
def test_matches_varlen_metadata_of_vllm(device: str) -> None:
    mamba2 = pytest.importorskip("vllm.v1.attention.backends.mamba2_attn")
    qsl, _, _ = random_batch(3, 24, 500)
    cu_chunk_seqlens, last, seq_idx = mamba2.compute_varlen_chunk_metadata(qsl, 64)
    # That helper cuts at multiples of the chunk in the packed batch.
    out = chunk_metadata(
        qsl.to(device),
        64,
        empty_lists(device, 24, len(seq_idx)),
        num_computed_tokens=qsl[:-1].to(device),
    )
    assert out.cu_chunk_seqlens.tolist() == cu_chunk_seqlens.tolist()
    assert out.last_chunk_indices.tolist() == last.tolist()
    assert out.seq_idx.tolist() == seq_idx.tolist()
