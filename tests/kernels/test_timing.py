"""Timing: what it refuses, and its arithmetic; on a GPU also that it measures."""

import os

import pytest

torch = pytest.importorskip("torch")

from chunk_planner.kernels import timing  # noqa: E402

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
    reason="takes times on a GPU",
)


def test_refuses_the_interpreter_in_one_sentence(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for timed in (
        timing.require_device,
        lambda: timing.time_calls({"none": []}),
        lambda: timing.time_host(lambda: None),
        lambda: timing.buffer_sets(1),
        timing.copy_gb_per_s,
    ):
        with pytest.raises(timing.NoDeviceError, match=r"^TRITON_INTERPRET=1 is set[^\n]*$"):
            timed()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refuses_a_machine_without_gpu_in_one_sentence(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(timing.NoDeviceError, match=r"^PyTorch sees no GPU here[^\n]*$"):
        timing.require_device()


def test_quantiles_are_per_call():
    found = timing.Timing.of([100.0 * (i + 1) for i in reversed(range(11))], calls_per_repeat=10)
    assert (found.p20_us, found.p50_us, found.p80_us) == (30.0, 60.0, 90.0)
    assert (found.repeats, found.calls_per_repeat) == (11, 10)


def test_bandwidth_is_a_share_of_the_copy(monkeypatch):
    monkeypatch.setattr(timing, "copy_gb_per_s", lambda: 4000.0)
    row = timing.Timing.of([10.0]).row(moved_bytes=20_000_000)
    assert row["gb_per_s"] == 2000.0
    assert row["percent_of_copy"] == 50.0
    assert "gb_per_s" not in timing.Timing.of([10.0]).row()


def test_buffers_outgrow_the_cache_and_fit_the_memory(monkeypatch):
    device = type("Properties", (), {"L2_cache_size": 60_000_000})
    monkeypatch.setattr(timing, "require_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 10**9))
    assert timing.fits(5 * 10**8)
    assert not timing.fits(6 * 10**8)
    assert timing.buffer_sets(60_000_000) == 4
    assert timing.buffer_sets(200_000_000) == 2
    assert timing.buffer_sets(10**10) == 2
    assert timing.buffer_sets(1000) == timing.MAX_CALLS_PER_REPLAY


def test_a_replay_lasts_long_enough_although_the_first_of_a_graph_is_slow(monkeypatch):
    class Graph:
        def __init__(self, calls):
            self.us, self.upload_us = 10.0 * len(calls), 400.0

        def replay_us(self):
            upload_us, self.upload_us = self.upload_us, 0.0
            return self.us + upload_us

    monkeypatch.setattr(timing, "require_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(timing, "warm", lambda _: None)
    monkeypatch.setattr(timing, "_graph", Graph)
    monkeypatch.setattr(timing, "_replay_us", Graph.replay_us)
    found = timing.time_calls({"ten": [lambda: None]})["ten"]
    assert found.p50_us * found.calls_per_repeat == timing.MIN_REPLAY_US
    assert found.p50_us == found.p80_us == 10.0


@needs_gpu
def test_twice_the_bytes_take_longer():
    small, large = (torch.empty(n, dtype=torch.uint8, device="cuda") for n in (2**27, 2**29))
    found = timing.time_calls({"small": [small.zero_], "large": [large.zero_]}, repeats=5)
    assert found["large"].p50_us > 2 * found["small"].p50_us
