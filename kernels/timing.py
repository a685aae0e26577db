"""Times kernels on the GPU: device events around replayed graphs, cold L2, quantiles.

Every call is warmed first. One CUDA graph then holds calls that rotate through sets of buffers
together larger than the L2, so that no call finds its own data there and the host's launches leave
no gaps. Each replay is timed by two device events; quantiles are over replays. Kernels that are
compared take turns, replay by replay, so that clocks and neighbours drift for all alike.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache

import torch

# Together the rotating buffers are this many times the L2: what a call touched is gone by its turn.
L2_TURNS = 3
# A replay should last many times the resolution of its events, about half a microsecond.
MIN_REPLAY_US = 500.0
MAX_CALLS_PER_REPLAY = 1024
COPY_PROBE_BYTES = 2**31
QUANTILES = {"p20_us": 0.2, "p50_us": 0.5, "p80_us": 0.8}


class NoDeviceError(RuntimeError):
    """There is no GPU to time on; the text is one sentence for the user."""


@dataclass(frozen=True)
class Timing:
    """Microseconds per call at three quantiles over `repeats`, each of `calls_per_repeat` calls."""

    p20_us: float
    p50_us: float
    p80_us: float
    repeats: int
    calls_per_repeat: int

    @classmethod
    def of(cls, times_us: Sequence[float], calls_per_repeat: int = 1) -> "Timing":
        """The quantiles (nearest rank) of repeats that took `times_us` each."""
        ordered = sorted(times_us)
        at = {
            name: ordered[round(share * (len(ordered) - 1))] / calls_per_repeat
            for name, share in QUANTILES.items()
        }
        return cls(**at, repeats=len(ordered), calls_per_repeat=calls_per_repeat)

    def row(self, moved_bytes: int | None = None) -> dict[str, float]:
        """The fields rounded to 10 ns; with the bytes a call moves also GB/s at the median."""
        row = {k: round(v, 2) if k in QUANTILES else v for k, v in asdict(self).items()}
        if moved_bytes is not None:
            row |= {"moved_bytes": moved_bytes, **bandwidth(moved_bytes, self.p50_us)}
        return row


def bandwidth(moved_bytes: int, time_us: float) -> dict[str, float]:
    """GB/s (bytes read plus bytes written), and its percentage of the copy measured here."""
    gb_per_s = moved_bytes / time_us / 1e3
    return {
        "gb_per_s": round(gb_per_s, 1),
        "percent_of_copy": round(100 * gb_per_s / copy_gb_per_s(), 1),
    }


def require_device() -> torch.device:
    """The GPU that timings are taken on.

    Raises:
        NoDeviceError: Under Triton's interpreter, or without a GPU that PyTorch sees.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise NoDeviceError(
            "TRITON_INTERPRET=1 is set, and an interpreted kernel's time says nothing: unset it"
        )
    if not torch.cuda.is_available():
        raise NoDeviceError("PyTorch sees no GPU here, and kernel times are taken on nothing else")
    return torch.device("cuda", torch.cuda.current_device())


def buffer_sets(bytes_per_set: int) -> int:
    """How many sets of buffers of that size make a cold-L2 measurement; at least 2.

    Half of the free memory bounds it, and so does a graph's length.
    """
    l2_bytes = torch.cuda.get_device_properties(require_device()).L2_cache_size
    wanted = 1 + -(-L2_TURNS * l2_bytes // bytes_per_set)
    return max(2, min(wanted, _affordable_bytes() // bytes_per_set, MAX_CALLS_PER_REPLAY))


def fits(num_bytes: int) -> bool:
    """Whether buffers of that size together leave half of the free memory alone."""
    require_device()
    return num_bytes <= _affordable_bytes()


def _affordable_bytes() -> int:
    torch.cuda.empty_cache()  # what the last measurement left in PyTorch's pool is free too
    return torch.cuda.mem_get_info()[0] // 2


def time_calls(
    competitors: Mapping[str, Sequence[Callable[[], None]]], repeats: int = 30
) -> dict[str, Timing]:
    """Times kernels against each other.

    Args:
        competitors: Per name, one call for each set of buffers (`buffer_sets`), all the same work,
            free of host synchronisation, so that a CUDA graph can hold it.
        repeats: Timed replays of each.
    """
    require_device()
    for calls in competitors.values():
        warm(calls)
    graphs = {}
    for name, calls in competitors.items():
        once = _graph(calls)
        once_us = min(_replay_us(once) for _ in range(3))  # the first also uploads the graph
        rounds = min(MIN_REPLAY_US / once_us, MAX_CALLS_PER_REPLAY / len(calls))
        calls = list(calls) * max(1, round(rounds))
        graphs[name] = (_graph(calls), len(calls))
        _replay_us(graphs[name][0])
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, (graph, _) in graphs.items():
            times[name].append(_replay_us(graph))
    return {name: Timing.of(times[name], calls) for name, (_, calls) in graphs.items()}


def time_host(call: Callable[[], None], repeats: int = 100) -> Timing:
    """Times host work that ends on the device (built on the CPU, then copied), by wall clock."""
    require_device()
    warm([call])
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return Timing.of(times)


def warm(calls: Sequence[Callable[[], None]]) -> None:
    """Runs every call twice, so that none compiles, loads or allocates while it is timed."""
    for call in [*calls, *calls]:
        call()
    torch.cuda.synchronize()


@cache
def copy_gb_per_s() -> float:
    """Bandwidth of PyTorch's copy of a large buffer here, bytes read plus bytes written, in GB/s.

    The ceiling of a kernel that moves bytes, measured in the same process on the same card.
    """
    device = require_device()
    size = min(COPY_PROBE_BYTES, _affordable_bytes() // 4)
    src = torch.empty(size, dtype=torch.uint8, device=device).random_()
    dst = torch.empty_like(src)
    return 2 * size / time_calls({"copy": [lambda: dst.copy_(src)]})["copy"].p50_us / 1e3


def _graph(calls: Sequence[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)
