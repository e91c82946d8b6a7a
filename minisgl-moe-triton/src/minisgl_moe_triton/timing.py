"""Times short kernels, and compiles many of them at once."""

import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Final

import torch

logger = logging.getLogger(__name__)

Call = Callable[[], object]

_SHORTEST_S, _REPEATS = 0.004, 3
_MOST_THREADS: Final = 16
_FAR_SLOWER: Final = 1.5


def time_on_gpu(calls: Sequence[Call], least: float = math.inf) -> float:
    """Return the seconds of one of ``calls``: of replays of a CUDA graph of them all, the median.

    Args:
        calls: what they need is compiled already.
        least: of others; what is far slower is not measured well.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # torch.cuda.graph empties the allocator's cache each time
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
    once = _seconds(graph, 1)
    if once > _FAR_SLOWER * least * len(calls):
        return once / len(calls)
    rounds = max(1, int(_SHORTEST_S / max(once, 1e-7)))
    repeats = _REPEATS if once < 10 * _SHORTEST_S else 1
    return median(_seconds(graph, rounds) for _ in range(repeats)) / len(calls)


def compile_in_parallel(calls: Sequence[Call]) -> list[bool]:
    """Run each call once, so that its kernels are compiled, and return which of them can run."""
    device = torch.cuda.current_device()

    def attempt(call: Call) -> bool:
        try:
            with torch.inference_mode(), torch.cuda.device(device):
                # A thread that has not met the device has no context to describe weights in.
                torch.cuda.synchronize()
                call()
        except Exception as error:  # too much shared memory, too many registers
            logger.debug("a launch cannot run here", exc_info=error)
            return False
        return True

    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        usable = list(pool.map(attempt, calls))
    torch.cuda.synchronize()
    return usable


def _seconds(graph: torch.cuda.CUDAGraph, rounds: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(rounds):
        graph.replay()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3 / rounds
