"""``minisgl bench host``: what a step costs the host, with everything but the device.

The production scheduler, prefix cache, plan encoder, staging buffers and sockets drive a null
engine, with overlap on; the detokenizer's messages go to a process that reads and drops them.
Every 1000th step the rows, lengths and slots are rebuilt from the staged bytes and compared with
the scheduler's own.
"""

import contextlib
import gc
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import zmq

from minisgl.benchmark.null_engine import VOCAB_SIZE, NullEngine
from minisgl.benchmark.plan_replay import PlanReplay
from minisgl.kvcache.radix_cache import RadixPrefixCache
from minisgl.message import BackendMessage, GenerateRequest, Pong, TokenBatch
from minisgl.message.sockets import private_addresses
from minisgl.processes import collector_at_rest
from minisgl.request import SamplingParams
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.zmq_transport import ZmqTransport

PROMPT_TOKENS = 256
COHORT_STEPS = 2000
CHECK_EVERY = 1000
WARM_UP = 3
"""Cohorts that are not measured: after them the pool is full of old prefixes, and the process has
most of its memory. Memory that the system has never handed out before costs microseconds a page."""

SERVING_TOKENS = 512
"""Tokens that each request of the serving steps generates."""

SETTLED_AFTER = 10
"""Cohorts after which the process has all its memory: the prefix cache is full by then."""

BLOCK_STEPS = 50
"""Set-ups are measured in turns of so many steps: a machine whose speed changes is then as slow
for each of them."""

_PARTS = ("receive", "choose", "stage", "commit", "send")


class Samples:
    """Microseconds of the steps of one kind: all of each step, by part, and of the CPU.

    On a busy machine the clock also counts what other programs do; ``cpu`` counts this thread.

    Args:
        capacity: most steps to keep; memory for them is taken at once, so that a long run grows
            by nothing of ours.
    """

    def __init__(self, capacity: int) -> None:
        self.parts = dict.fromkeys(_PARTS, 0.0)
        self.num_steps = 0
        self._total = np.full(capacity, np.nan)
        self._num_tokens = 0
        self._cpu = 0.0

    def add(self, parts: dict[str, float], cpu: float, num_tokens: int) -> None:
        """Count one step; those beyond the capacity are left out."""
        if self.num_steps == len(self._total):
            return
        self._total[self.num_steps] = sum(parts.values())
        self.num_steps += 1
        self._num_tokens += num_tokens
        self._cpu += cpu
        for name, value in parts.items():
            self.parts[name] += value

    def summary(self) -> dict[str, float]:
        """Return means by part, and mean, median and 99th percentile of the whole."""
        n, times = self.num_steps, self._total[: self.num_steps]
        if not n:
            return {"steps": 0}
        return {
            "steps": n,
            "tokens": self._num_tokens / n,
            **{name: value / n for name, value in self.parts.items()},
            "cpu": self._cpu / n,
            "mean": float(times.mean()),
            "p50": float(np.percentile(times, 50)),
            "p99": float(np.percentile(times, 99)),
        }


class HostResult:
    """What one set-up cost, in microseconds a step.

    Attributes:
        rows, page_size: the set-up.
        decode, prefill: steps without and with prompt chunks, of requests in cohorts.
        serving: steps of both kinds, while each request that ends is replaced by a new one.
        num_comparisons: how often the staged bytes were compared with the scheduler's state.
        memory_growth: bytes that the process grew by after ``SETTLED_AFTER`` cohorts; ``None`` if
            it ran no more, or other set-ups beside this one.
        settled_steps: decode steps after that.
    """

    def __init__(self, rows: int, page_size: int, num_steps: int) -> None:
        self.rows = rows
        self.page_size = page_size
        self.decode = Samples(num_steps)
        self.prefill = Samples(num_steps)
        self.serving = Samples(num_steps)
        self.num_comparisons = 0
        self.memory_growth: int | None = None
        self.settled_steps = 0

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain data."""
        return {
            "rows": self.rows,
            "page_size": self.page_size,
            "decode": self.decode.summary(),
            "prefill": self.prefill.summary(),
            "serving": self.serving.summary(),
            "comparisons": self.num_comparisons,
            "memory_growth_bytes": self.memory_growth,
            "memory_growth_steps": self.settled_steps,
        }


class TimedTransport:
    """The server's own transport; requests are put in here, and the time for sending is added up.

    Args:
        inner: the real one.
    """

    def __init__(self, inner: ZmqTransport) -> None:
        self._inner = inner
        self.requests: list[BackendMessage] = []
        self.num_ended = 0
        self.send_s = 0.0

    def receive(self, timeout: float | None) -> list[BackendMessage]:
        """Poll the real socket; requests of the benchmark come on top."""
        messages = self._inner.receive(timeout)
        if self.requests:
            messages, self.requests = [*messages, *self.requests], []
        return messages

    def send(self, batch: TokenBatch) -> None:
        """Encode and send."""
        began = time.perf_counter()
        self._inner.send(batch)
        self.send_s += time.perf_counter() - began
        self.num_ended += len(batch.finished_uids)

    def pong(self, message: Pong) -> None:
        """Nobody asks."""


def bench_host(
    rows: int, page_size: int, num_steps: int, *, prompt: int = PROMPT_TOKENS
) -> HostResult:
    """Measure one set-up; see ``bench_hosts``."""
    return bench_hosts([rows], page_size, num_steps, prompt=prompt)[0]


def bench_hosts(
    rows: Sequence[int], page_size: int, num_steps: int, *, prompt: int = PROMPT_TOKENS
) -> list[HostResult]:
    """Measure set-ups of so many rows each, in turns of a few steps.

    For each, ``num_steps`` decode steps and the prefill steps before them: requests come in
    cohorts, all prompts at once, then decode steps until all have ended. Then as many steps are
    measured while requests come and go one by one.
    """
    with collector_at_rest(), contextlib.ExitStack() as stack:
        runs = [
            _Run(num, page_size, prompt, num_steps, stack.enter_context(_sink())) for num in rows
        ]
        turns = [run.measure(alone=len(runs) == 1) for run in runs]
        while turns:
            turns = [turn for turn in turns if _take_turn(turn)]
        return [run.result for run in runs]


def _take_turn(turn: Iterator[None]) -> bool:
    """Run a few steps of one set-up; returns whether there are more."""
    return next(turn, turn) is None


class _Run:
    """One set-up."""

    def __init__(
        self, rows: int, page_size: int, prompt: int, num_steps: int, transport: TimedTransport
    ) -> None:
        length = prompt + COHORT_STEPS + 2
        pages = -(-length // page_size)
        self._engine = NullEngine(
            # Room for a cohort and a half: from the second one on, old prefixes are evicted.
            rows=rows, page_size=page_size, max_seq_len=length, num_pages=rows * pages * 3 // 2,
        )  # fmt: skip
        self._transport = transport
        self._scheduler = Scheduler(
            self._engine,
            RadixPrefixCache(page_size),
            transport,
            max_step_tokens=8192,
            overlap=True,
            mixed=False,
        )
        self._replay = PlanReplay(self._engine.info)
        self._prompt = prompt
        self._random = np.random.default_rng(0)
        self._num_steps = num_steps
        self.result = HostResult(rows, page_size, num_steps)
        self._num_cohorts = 0
        self._num_sent = 0
        self._since_check = 0
        self._num_run = 0

    def measure(self, *, alone: bool) -> Iterator[None]:
        """Run cohorts until all decode steps are measured; others may have a turn at each yield.

        Args:
            alone: no others do: what the process grows by is this set-up's.
        """
        result, settled, before = self.result, 0, 0
        for _ in range(WARM_UP):
            yield from self._run_cohort(HostResult(0, 0, 0), COHORT_STEPS)
        while (left := self._num_steps - result.decode.num_steps) > 0:
            yield from self._run_cohort(result, min(left, COHORT_STEPS))
            if self._num_cohorts == SETTLED_AFTER:
                settled, before = self._resident_bytes(), result.decode.num_steps
        if alone and self._num_cohorts > SETTLED_AFTER:
            result.memory_growth = self._resident_bytes() - settled
            result.settled_steps = result.decode.num_steps - before
        yield from self._serve(result.serving)

    def _run_cohort(self, result: HostResult, num_steps: int) -> Iterator[None]:
        """Start ``rows`` requests that end after ``num_steps`` decode steps, and run them."""
        self._num_cohorts += 1
        for _ in range(self._engine.info.max_running_requests):
            self._send(num_steps + 1)
        while self._transport.requests or self._scheduler.has_work:
            yield from self._step(result)

    def _serve(self, serving: Samples) -> Iterator[None]:
        """Keep all rows busy with requests of different ages, for half as many steps first."""
        warm_up = Samples(self._num_steps // 2)
        for _ in range(self._engine.info.max_running_requests):
            self._send(int(self._random.integers(1, SERVING_TOKENS + 1)))
        for samples, num_steps in ((warm_up, self._num_steps // 2), (serving, self._num_steps)):
            while samples.num_steps < num_steps:
                alive = self._num_sent - self._transport.num_ended
                for _ in range(self._engine.info.max_running_requests - alive):
                    self._send(SERVING_TOKENS)
                yield from self._step(self.result, samples)

    def _send(self, num_tokens: int) -> None:
        """Send one request for ``num_tokens`` tokens."""
        length = int(self._random.integers(self._prompt // 2, self._prompt + 1))
        prompt = self._random.integers(VOCAB_SIZE - 1, size=length, dtype=np.int32)
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        self._num_sent += 1
        self._transport.requests.append(GenerateRequest(self._num_sent, prompt.tobytes(), params))

    def _step(self, result: HostResult, samples: Samples | None = None) -> Iterator[None]:
        """Run one step; counted among ``samples``, or the result's of its kind.

        Yields now and then, which lets another set-up have its turn.
        """
        self._num_run += 1
        if self._num_run % BLOCK_STEPS == 0:
            yield
        engine, scheduler, transport = self._engine, self._scheduler, self._transport
        engine.last_plan, transport.send_s = None, 0.0
        cpu_began, began = time.thread_time(), time.perf_counter()
        scheduler.receive(0)
        received = time.perf_counter()
        scheduler.step()
        ended, cpu = time.perf_counter(), time.thread_time() - cpu_began
        plan = engine.last_plan
        if plan is not None:
            parts = {
                "receive": received - began,
                "choose": engine.launched_at - received,
                "stage": engine.staged_at - engine.launched_at,
                "commit": ended - engine.staged_at - transport.send_s,
                "send": transport.send_s,
            }
            of_kind = result.prefill if len(plan.chunks) else result.decode
            microseconds = {name: value * 1e6 for name, value in parts.items()}
            (samples or of_kind).add(microseconds, cpu * 1e6, plan.num_tokens)
        self._since_check += 1
        if plan is not None and not len(plan.chunks) and self._since_check >= CHECK_EVERY:
            self._check(result)

    def _check(self, result: HostResult) -> None:
        rows = self._scheduler.decode_rows
        self._replay.apply(self._engine.take_staged())
        if len(rows) == len(self._replay.rows):  # else a row has just ended: the next step will do
            self._since_check = 0
            self._replay.compare(rows, self._scheduler.table)
            result.num_comparisons += 1

    def _resident_bytes(self) -> int:
        """Return the memory of this process that is really there, in bytes; 0 where unknown."""
        self._replay.apply(self._engine.take_staged())
        gc.collect()
        statm = Path("/proc/self/statm")
        return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0


def growth(results: list[HostResult]) -> dict[int, float]:
    """Return, by page size, how many times a decode step of 32 rows one of 1024 rows costs."""
    means = {(r.rows, r.page_size): r.decode.summary().get("mean", 0.0) for r in results}
    return {
        size: means[1024, size] / means[32, size]
        for rows, size in means
        if rows == 32 and (1024, size) in means
    }


@contextlib.contextmanager
def _sink() -> Iterator[TimedTransport]:
    """Yield the server's transport, with a process behind it that reads and drops."""
    with private_addresses() as addresses:
        context = multiprocessing.get_context("spawn")
        reader = context.Process(target=_read_for_ever, args=(addresses.detokenizer,), daemon=True)
        reader.start()
        transport = ZmqTransport(addresses)
        try:
            yield TimedTransport(transport)
        finally:
            transport.close()
            reader.kill()
            reader.join()


def _read_for_ever(address: str) -> None:
    socket = zmq.Context().socket(zmq.PULL)
    socket.rcvhwm = 0
    socket.bind(address)
    while True:
        socket.recv(copy=False)
