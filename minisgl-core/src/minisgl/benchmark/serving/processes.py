"""A load from one process, or from several where one cannot keep up."""

import multiprocessing
import time
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVar

import msgspec

from minisgl.benchmark.serving.load import Job, Target, run_load
from minisgl.benchmark.serving.records import LoadResult, RequestRecord
from minisgl.errors import MinisglError
from minisgl.processes import raise_file_limit

START_DELAY: Final = 0.05
"""Seconds between the last process's being ready and the first request."""

_READY: Final = b"ready"
ResultT = TypeVar("ResultT")


def run(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run ``work`` in a fast event loop."""
    import uvloop

    return uvloop.run(work)


def generate_load(
    target: Target,
    jobs: Sequence[Job],
    *,
    max_concurrency: int | None,
    num_processes: int,
    on_end: Callable[[RequestRecord], object] = lambda _: None,
) -> LoadResult:
    """Send all ``jobs`` from ``num_processes`` processes that begin together.

    Requests go to the processes in turn, and each has its share of ``max_concurrency``.

    Raises:
        MinisglError: a process was lost.
    """
    raise_file_limit()
    if num_processes == 1:
        return run(_run_here(target, jobs, max_concurrency, on_end))
    context = multiprocessing.get_context("spawn")
    shares = concurrency_shares(max_concurrency, num_processes)
    children = []
    try:
        for index, share in enumerate(shares):
            ours, theirs = context.Pipe()
            process = context.Process(target=_child, args=(theirs, share), daemon=True)
            process.start()
            theirs.close()
            part = list(jobs[index::num_processes])
            ours.send_bytes(msgspec.msgpack.encode((target, part)))
            children.append((process, ours))
        for _, pipe in children:
            _receive(pipe)
        start = time.perf_counter() + START_DELAY
        for _, pipe in children:
            pipe.send_bytes(msgspec.msgpack.encode(start))
        parts = [msgspec.msgpack.decode(_receive(p), type=LoadResult) for _, p in children]
    finally:
        for process, pipe in children:
            pipe.close()
            process.join(1)
            process.kill()
    records = sorted((one for part in parts for one in part.records), key=lambda one: one.number)
    for record in records:
        on_end(record)
    return LoadResult(records, [one for part in parts for one in part.health])


def concurrency_shares(max_concurrency: int | None, num_processes: int) -> list[int | None]:
    """Return how many requests each process may have at once; they sum to the whole."""
    if max_concurrency is None:
        return [None] * num_processes
    each, more = divmod(max_concurrency, num_processes)
    return [each + (index < more) for index in range(num_processes)]


async def _run_here(
    target: Target,
    jobs: Sequence[Job],
    max_concurrency: int | None,
    on_end: Callable[[RequestRecord], object],
) -> LoadResult:
    result = await run_load(
        target,
        jobs,
        max_concurrency=max_concurrency,
        start=time.perf_counter() + START_DELAY,
        on_end=on_end,
    )
    result.records.sort(key=lambda one: one.number)
    return result


def _child(pipe: Connection, max_concurrency: int | None) -> None:
    """Run one part, in a process of its own."""
    target, jobs = msgspec.msgpack.decode(pipe.recv_bytes(), type=tuple[Target, list[Job]])
    pipe.send_bytes(_READY)
    # perf_counter is the system's monotonic clock: all processes of a machine agree on it.
    start = msgspec.msgpack.decode(pipe.recv_bytes(), type=float)
    result = run(run_load(target, jobs, max_concurrency=max_concurrency, start=start))
    pipe.send_bytes(msgspec.msgpack.encode(result))


def _receive(pipe: Connection) -> bytes:
    try:
        return pipe.recv_bytes()
    except EOFError as error:
        raise MinisglError("a client process has ended before its requests have") from error
