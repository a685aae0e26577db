"""Times a kernel on the GPU: device events around replayed graphs, cold L2, quantiles.

How: every call is warmed first. One CUDA graph then holds `calls_per_replay` calls that rotate
through sets of buffers together larger than the L2, so no call finds its own data there, and a
replay leaves no gaps in which the host launches. Each replay is timed by two device events; the
quantiles are over replays.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache

import torch

# Rotating buffers hold this many times the L2: what a call touched is gone when its turn comes.
L2_TURNS = 3
# A replay should outlast the events' resolution, about half a microsecond, many times.
MIN_REPLAY_US = 500.0
COPY_PROBE_BYTES = 2**31


class NoDeviceError(RuntimeError):
    """There is no GPU to time on; the text is one sentence for the user."""


@dataclass(frozen=True)
class Timing:
    """One kernel's time, in microseconds per call, at three quantiles over `replays`."""

    p20_us: float
    p50_us: float
    p80_us: float
    replays: int
    calls_per_replay: int

    def bandwidth(self, moved_bytes: int) -> dict[str, float]:
        """GB/s at the median for `moved_bytes` per call, and percent of the measured copy's."""
        gb_per_s = moved_bytes / self.p50_us / 1e3
        return {
            "moved_bytes": moved_bytes,
            "gb_per_s": round(gb_per_s, 1),
            "percent_of_copy": round(100 * gb_per_s / copy_gb_per_s(), 1),
        }

    def row(self) -> dict[str, float]:
        """The fields, rounded to 10 ns."""
        return {k: round(v, 2) if k.endswith("_us") else v for k, v in asdict(self).items()}


def require_device() -> torch.device:
    """The GPU that timings are taken on.

    Raises:
        NoDeviceError: Under Triton's interpreter, or without a CUDA or ROCm device.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise NoDeviceError(
            "TRITON_INTERPRET=1 is set: interpreted kernels have no time worth measuring, unset it"
        )
    if not torch.cuda.is_available():
        raise NoDeviceError(
            "no CUDA device is visible to PyTorch: kernel times are only taken on a GPU"
        )
    return torch.device("cuda", torch.cuda.current_device())


def buffer_sets(bytes_per_set: int, free_share: float = 0.5) -> int:
    """How many sets of buffers of that size a cold-L2 measurement rotates through.

    At least 2; fewer than would fill `free_share` of the device's free memory.
    """
    device = require_device()
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    wanted = -(-L2_TURNS * l2_bytes // max(bytes_per_set, 1)) + 1
    affordable = int(free_share * torch.cuda.mem_get_info(device)[0] // max(bytes_per_set, 1))
    # beyond 512 sets the buffers of one call are a few hundred KiB and their allocation dominates
    return max(2, min(wanted, affordable, 512))


def warm(calls: Sequence[Callable[[], None]]) -> None:
    """Runs every call twice, so that none compiles, allocates or tunes while it is timed."""
    for _ in range(2):
        for call in calls:
            call()
    torch.cuda.synchronize()


def time_calls(calls: Sequence[Callable[[], None]], replays: int = 30) -> Timing:
    """Times one kernel launched as `calls`, the same work on one set of buffers each.

    Args:
        calls: As many as `buffer_sets` says; already `warm`ed, capturable in a CUDA graph.
        replays: Graph replays that are timed, after two that are not.
    """
    require_device()
    once = _replay_us(_graph(calls), replays=3)
    repeats = max(1, round(MIN_REPLAY_US / max(sorted(once)[1], 1e-3)))
    total = repeats * len(calls)
    times = sorted(t / total for t in _replay_us(_graph(list(calls) * repeats), replays))
    p20, p50, p80 = (times[round(q * (len(times) - 1))] for q in (0.2, 0.5, 0.8))
    return Timing(p20, p50, p80, replays, total)


def time_host(call: Callable[[], None], repeats: int = 100) -> Timing:
    """Times host work that ends on the device (build on the CPU, copy over), synchronised.

    Wall clock, because what is waited for is the host; same fields as `time_calls`.
    """
    from time import perf_counter_ns

    require_device()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = perf_counter_ns()
        call()
        torch.cuda.synchronize()
        times.append((perf_counter_ns() - start) / 1e3)
    times.sort()
    p20, p50, p80 = (times[round(q * (len(times) - 1))] for q in (0.2, 0.5, 0.8))
    return Timing(p20, p50, p80, repeats, 1)


@cache
def copy_gb_per_s() -> float:
    """Bandwidth of a large device-to-device copy here, bytes read plus bytes written, in GB/s.

    The ceiling that `percent_of_copy` is a share of: measured in the same run, on the same card.
    """
    device = require_device()
    size = min(COPY_PROBE_BYTES, torch.cuda.mem_get_info(device)[0] // 8)
    src = torch.empty(size, dtype=torch.uint8, device=device).random_()
    dst = torch.empty_like(src)
    calls = [lambda: dst.copy_(src)]
    warm(calls)
    return 2 * size / time_calls(calls).p50_us / 1e3


def _graph(calls: Sequence[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    for _ in range(2):
        graph.replay()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(replays)
    ]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in events]
