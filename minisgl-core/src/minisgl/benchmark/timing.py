"""How long a call takes on a device, and what the device can do at most."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

import torch

Call = Callable[[], object]
Clock = Literal["graph", "events", "clock"]

_REPEATS: Final = 5
"""Measurements, of which the median counts."""

_LONG_S, _REPEATS_OF_LONG = 0.1, 3
"""Runs that take so long are repeated only so often."""

_HEAD_START: Final = 200_000
"""Cycles that the device waits, about 0.1 ms: by then the host has launched the first replay."""

SHORTEST_S: Final = 0.01
"""A measurement runs the calls again and again for at least so long."""

_GIB: Final = 2**30
_COLUMNS: Final = 8192


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one call.

    Attributes:
        repeats: seconds of a call in each measurement, in their order.
        clock: ``graph`` (CUDA events around replays of a graph), ``events`` (around a loop of
            launches, which counts gaps that the host leaves), or ``clock`` (of the host).
    """

    repeats: tuple[float, ...]
    clock: Clock

    @property
    def seconds(self) -> float:
        """Median over the measurements."""
        return median(self.repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What a device reaches with nothing else to do: what kernels are compared with.

    Attributes:
        read_bytes_per_s: memory read by the fastest of some reductions of a large buffer.
        flops_per_s: floating-point operations of a large matrix product.
    """

    read_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is measured on.

    Attributes:
        device, dtype: where, and in what.
        ceilings: of the device.
        shortest_s: least seconds of a measurement.
    """

    device: torch.device
    dtype: torch.dtype
    ceilings: Ceilings
    shortest_s: float


def time_calls(
    calls: Sequence[Call],
    device: torch.device,
    *,
    graph: bool,
    shortest_s: float = SHORTEST_S,
) -> Timing:
    """Return the time of one of ``calls``, which do the same on different data.

    Args:
        calls: run one after the other; together they should touch much more than the caches hold.
        device: where they run.
        graph: capture them all in one CUDA graph and time its replays, on a GPU.
        shortest_s: least seconds of a measurement.
    """
    if device.type != "cuda":
        return Timing(_time_loop(calls, time.perf_counter, shortest_s), "clock")
    run = _capture(calls) if graph else lambda: _run(calls)
    # In a loop of launches the host's part counts, in front of a graph it does not.
    head_start = _HEAD_START if graph else 0
    repeats = tuple(one / len(calls) for one in _time_on_gpu(run, shortest_s, head_start))
    return Timing(repeats, "graph" if graph else "events")


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, size: float = 1.0) -> Ceilings:
    """Measure what the device reaches.

    Args:
        device: 8 GiB and products of 8192 are for a GPU; a CPU gets 0.5 GiB and 2048.
        dtype: of the product.
        size: shrink both, to have an answer quickly.
    """
    gib, order = (8.0, 8192) if device.type == "cuda" else (0.5, 2048)
    if device.type == "cuda":
        gib = min(gib, torch.cuda.mem_get_info(device)[0] / _GIB / 2)
    order = max(64, int(order * size) // 64 * 64)
    # All ones: a sum of anything needs the same time, and nothing overflows.
    buffer = torch.ones(int(gib * size * _GIB) // 4, dtype=torch.float32, device=device)
    num_bytes = buffer.nbytes
    reads = [time_calls([read], device, graph=False).seconds for read in _reads(buffer)]
    del buffer
    a, b = (torch.randn(order, order, dtype=dtype, device=device) for _ in range(2))
    product = time_calls([lambda: torch.matmul(a, b)], device, graph=False)
    return Ceilings(
        read_bytes_per_s=num_bytes / min(reads), flops_per_s=2 * order**3 / product.seconds
    )


def _reads(buffer: torch.Tensor) -> list[Call]:
    """Return what reads a float32 buffer once: none is the fastest on every device."""
    if buffer.device.type == "cpu":
        return [buffer.sum]
    table = buffer[: len(buffer) // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
    ones = buffer[:_COLUMNS]
    return [buffer.sum, buffer.amax, lambda: table.sum(1), lambda: torch.mv(table, ones)]


def num_copies(bytes_each: int, device: torch.device, *, most: int = 128) -> int:
    """Return how many inputs of a size are needed so that none is still in a cache at its turn.

    At least 2, at most ``most``: inputs so small that even those fit into the cache are in the
    cache of a real model too, where another kernel has just written them.
    """
    cache = 64 * 2**20
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(most, -(-4 * cache // max(1, bytes_each))))


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _time_loop(
    calls: Sequence[Call], clock: Callable[[], float], shortest_s: float
) -> tuple[float, ...]:
    """Return the seconds of one call by the host's clock, in each measurement."""
    _run(calls)
    times: list[float] = []
    for _ in range(_REPEATS):
        rounds, began = 0, clock()
        while not rounds or clock() - began < shortest_s:
            _run(calls)
            rounds += 1
        times.append((clock() - began) / rounds / len(calls))
    return tuple(times)


def _capture(calls: Sequence[Call]) -> Call:
    """Return what replays the calls as one CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # what compiles or allocates does so before the capture
            _run(calls)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _run(calls)
    return graph.replay


def _time_on_gpu(run: Call, shortest_s: float, head_start: int) -> tuple[float, ...]:
    """Return the seconds of one run, by CUDA events around as many as fill ``shortest_s``.

    What takes long is measured fewer times: nothing but noise of a few microseconds differs.
    """
    once = _events(run, 1, head_start)
    if once < _LONG_S:
        once = _events(run, 1, head_start)  # the first one may have loaded or compiled
    rounds = max(1, int(shortest_s / max(once, 1e-7)))
    repeats = _REPEATS if once < _LONG_S else _REPEATS_OF_LONG
    return tuple(_events(run, rounds, head_start) for _ in range(repeats))


def _events(run: Call, rounds: int, head_start: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    if head_start:
        torch.cuda._sleep(head_start)  # type: ignore[no-untyped-call]  # noqa: SLF001
    begin.record()
    for _ in range(rounds):
        run()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3 / rounds
