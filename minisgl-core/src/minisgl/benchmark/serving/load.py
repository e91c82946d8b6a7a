"""Sends requests when they are due and notes when each token of their answers arrives."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec

from minisgl.benchmark.serving.chunks import (
    BadStreamError,
    EventReader,
    decode_chunk,
    error_message,
)
from minisgl.benchmark.serving.http_client import Address, ConnectionFailedError, HttpClient
from minisgl.benchmark.serving.records import ClientHealth, Counted, LoadResult, RequestRecord
from minisgl.errors import MinisglError

LAG_INTERVAL: Final = 0.01
MAX_ERROR_BODY: Final = 10_000
DONE: Final = b"[DONE]"


class Target(msgspec.Struct, frozen=True):
    """The server and how it is asked.

    Attributes:
        base_url: its address.
        path: of the endpoint, below the API's own.
        headers: of every request.
        timeout: seconds that one request may take.
    """

    base_url: str
    path: str
    headers: dict[str, str]
    timeout: float


class Job(msgspec.Struct, frozen=True):
    """One request, ready to be sent ``due`` seconds after the start."""

    number: int
    due: float
    body: bytes


class _Exchange:
    """Follows one answer."""

    def __init__(self, record: RequestRecord, start: float) -> None:
        self._record = record
        self._start = start
        self._reader = EventReader()
        self._raw = bytearray()
        self._last = 0.0
        self._num_ids = 0
        self._num_reported = 0
        self._num_reports = 0
        self._is_done = False
        self.problem: str | None = None

    def take(self, data: bytes, now: float) -> None:
        """Read a piece of the body that arrived at ``now``."""
        if len(self._raw) < MAX_ERROR_BODY:
            self._raw += data[:MAX_ERROR_BODY]
        self._read(self._reader.feed(data), now)

    def _read(self, events: Sequence[bytes], now: float) -> None:
        for event in events:
            if event == DONE:
                self._is_done = True
            elif self.problem is None:
                try:
                    self._take_event(event, now)
                except BadStreamError as error:
                    self.problem = str(error)

    def _take_event(self, event: bytes, now: float) -> None:
        chunk = decode_chunk(event)
        record, at = self._record, now - self._start
        num_ids = chunk.num_token_ids
        self._num_ids += num_ids or 0
        num_new = num_ids
        if chunk.usage is not None:
            usage = chunk.usage
            record.input_tokens = usage.prompt_tokens or record.input_tokens
            record.cached_tokens = usage.cached_tokens
            if usage.completion_tokens is not None:
                # Only a server that counts in every chunk says what is in this one.
                if self._num_reports >= record.num_chunks:
                    num_new = usage.completion_tokens - self._num_reported
                self._num_reported = usage.completion_tokens
                self._num_reports += 1
        if chunk.has_output:
            record.num_chunks += 1
            if record.first_token is None:
                record.first_token = at
            else:
                count = max(1, num_new or 1)
                record.intervals += [(at - self._last) / count] * count
            self._last = at
        if chunk.choices:
            record.ended = at
        record.finish_reason = chunk.finish_reason or record.finish_reason

    def finish(self, status: int, now: float) -> None:
        """Complete the record, or say what is missing."""
        record = self._record
        record.status = status
        if status != HTTPStatus.OK:
            record.error = f"HTTP {status}: {error_message(bytes(self._raw))}"
        else:
            self._read(self._reader.close(), now)
            record.error = self.problem or self._missing()
        if record.error is not None:
            record.ended = now - self._start
        if self._num_reports:
            record.output_tokens, record.counted = self._num_reported, Counted.USAGE
        elif self._num_ids:
            record.output_tokens, record.counted = self._num_ids, Counted.TOKEN_IDS
        else:
            record.output_tokens, record.counted = record.num_chunks, Counted.CHUNKS

    def _missing(self) -> str | None:
        record = self._record
        if record.finish_reason is None and not self._is_done:
            return "the stream ended without a finish_reason and without [DONE]"
        if record.finish_reason == "error":
            return "the answer's finish_reason is 'error'"
        if record.first_token is None:
            if not self._num_reported:
                return "the answer holds no token"
            record.first_token = record.ended  # tokens without text: only the end was seen
        return None


async def run_load(
    target: Target,
    jobs: Sequence[Job],
    *,
    max_concurrency: int | None,
    start: float,
    on_end: Callable[[RequestRecord], object] = lambda _: None,
) -> LoadResult:
    """Send all ``jobs``, in order, each when it is due and a place is free.

    Args:
        target: where to.
        jobs: ascending by ``due``.
        max_concurrency: requests at once; ``None`` for no limit.
        start: the time (``time.perf_counter``) from which ``due`` counts.
        on_end: told each record as it ends.
    """
    client = HttpClient(Address.parse(target.base_url), target.headers)
    places = asyncio.Semaphore(max_concurrency or len(jobs) or 1)
    records: list[RequestRecord] = []
    running: set[asyncio.Task[None]] = set()
    health = ClientHealth(0.0, 0.0)
    lag = asyncio.create_task(_watch_lag(health.loop_lag))
    await _sleep_until(start)
    cpu_before, wall_before = time.process_time(), time.perf_counter()

    async def send(job: Job) -> None:
        try:
            record = await _request(client, target, job, start)
        finally:
            places.release()
        records.append(record)
        on_end(record)

    try:
        for job in jobs:
            await _sleep_until(start + job.due)
            await places.acquire()
            task = asyncio.create_task(send(job))
            running.add(task)
            task.add_done_callback(running.discard)
        while running:
            await asyncio.gather(*running)
    finally:
        lag.cancel()
        for task in running:
            task.cancel()
        client.close()
    health.cpu_s = time.process_time() - cpu_before
    health.wall_s = time.perf_counter() - wall_before
    return LoadResult(records, [health])


async def _request(client: HttpClient, target: Target, job: Job, start: float) -> RequestRecord:
    record = RequestRecord(job.number, job.due, sent=time.perf_counter() - start, intervals=[])
    exchange = _Exchange(record, start)
    try:
        async with asyncio.timeout(target.timeout):
            head = await client.post(target.path, job.body, exchange.take)
    except TimeoutError:
        record.error = f"no complete answer within {target.timeout:g} s"
    except ConnectionFailedError as error:
        record.error = exchange.problem or str(error)
    else:
        exchange.finish(head.status, time.perf_counter())
        return record
    record.ended = time.perf_counter() - start
    return record


async def _sleep_until(when: float) -> None:
    while (left := when - time.perf_counter()) > 0:
        await asyncio.sleep(left)


async def _watch_lag(lags: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LAG_INTERVAL)
        lags.append(max(0.0, time.perf_counter() - before - LAG_INTERVAL))


async def fetch(target: Target, path: str) -> Any:
    """Return the JSON that ``GET path`` answers.

    Raises:
        MinisglError: the server is not there, or refuses.
    """
    body = bytearray()
    client = HttpClient(Address.parse(target.base_url), target.headers)
    with contextlib.closing(client):
        head = await client.get(path, lambda data, _: body.extend(data))
    if head.status != HTTPStatus.OK:
        raise MinisglError(f"GET {path}: HTTP {head.status}: {error_message(bytes(body))}")
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise MinisglError(f"GET {path} answers no JSON: {error}") from error


def request_body(
    prompt: str | list[int],
    output_len: int,
    *,
    model: str | None,
    chat: bool,
    extra: Mapping[str, Any],
) -> bytes:
    """Return the JSON body of one streamed request; a field that is ``None`` is left out."""
    asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    fields = {
        "model": model,
        **asked,
        "max_tokens": output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }
    return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})
