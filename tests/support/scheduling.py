"""Drives a scheduler with a fake engine and records what its clients would see."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from minisgl.kvcache.naive_cache import NaivePrefixCache
from minisgl.kvcache.radix_cache import RadixPrefixCache
from minisgl.message import AbortRequest, GenerateRequest, TokenBatch
from minisgl.request import RequestStats, SamplingParams, StepStats
from minisgl.scheduler.policy import PolicyName
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.transport import MemoryTransport
from minisgl.scheduler.waiting import OrderName
from minisgl.structured.compiler import GrammarCompiler
from support.fake_engine import FakeEngine
from support.toy_grammar import InlineCompiler


@dataclass
class Client:
    """What one request's client has received."""

    tokens: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    num_cached: int = 0
    started: bool = False


class Recorder:
    """Observers that keep everything."""

    def __init__(self, *, listens: bool = True) -> None:
        self.has_step_observers = self.has_request_observers = listens
        self.steps: list[StepStats] = []
        self.requests: list[RequestStats] = []

    def step_finished(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def request_finished(self, stats: RequestStats) -> None:
        self.requests.append(stats)


class Harness:
    """A scheduler, a fake engine and the clients."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 1,
        max_seq_len: int = 48,
        rows: int = 4,
        budget: int = 16,
        overlap: bool = True,
        mixed: bool = True,
        cache: str = "radix",
        lazy: bool = True,
        policy: PolicyName = "decode-first",
        order: OrderName = "fcfs",
        observed: bool = True,
        compiler: GrammarCompiler | None = None,
        max_queued_tokens: int | None = None,
        **engine_options: object,
    ) -> None:
        self.engine = FakeEngine(
            num_pages=num_pages,
            page_size=page_size,
            max_seq_len=max_seq_len,
            max_running_requests=rows,
            lazy=lazy,
            **engine_options,  # type: ignore[arg-type]
        )
        self.transport = MemoryTransport()
        self.recorder = Recorder(listens=observed)
        make = RadixPrefixCache if cache == "radix" else NaivePrefixCache
        self.scheduler = Scheduler(
            self.engine,
            make(page_size),
            self.transport,
            max_step_tokens=budget,
            overlap=overlap,
            mixed=mixed,
            policy=policy,
            order=order,
            observers=self.recorder,
            compiler=compiler or InlineCompiler(),
            max_queued_tokens=max_queued_tokens,
        )
        self.clients: dict[int, Client] = {}

    def submit(
        self,
        uid: int,
        prompt: list[int],
        priority: int = 0,
        *,
        salt: str | None = None,
        **params: object,
    ) -> None:
        """Send a request; it is received with the next step."""
        token_ids = np.array(prompt, dtype="<i4").tobytes()
        self.clients[uid] = Client()
        sampling = SamplingParams(temperature=0, **params)  # type: ignore[arg-type]
        self.transport.inbox.append(GenerateRequest(uid, token_ids, sampling, priority, salt))

    def abort(self, uid: int) -> None:
        """Abort a request, known or not."""
        self.transport.inbox.append(AbortRequest([uid]))

    def step(self) -> None:
        """Receive, step, check the books, deliver."""
        self.scheduler.receive(0)
        self.scheduler.step()
        self.scheduler.check()
        self._deliver()

    def finish(self, limit: int = 5000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            self.step()
            if not self.scheduler.has_work and not self.transport.inbox:
                break
        else:
            raise AssertionError(f"work is left after {limit} steps")
        assert self.scheduler.num_running == 0
        assert self.scheduler.num_waiting == 0
        assert self.scheduler.num_queued_tokens == 0
        held = self.scheduler.cache.prefix_cache.num_pages
        assert self.scheduler.cache.num_free + held == self.engine.info.num_pages
        assert self.scheduler.cache.prefix_cache.num_evictable_pages == held, "a page stays locked"

    def events(self) -> Iterator[TokenBatch]:
        """Take the messages for the detokenizer."""
        yield from self.transport.outbox
        self.transport.outbox.clear()

    def _deliver(self) -> None:
        for batch in self.events():
            for start in batch.started:
                assert not self.clients[start.uid].started, "a request is announced twice"
                self.clients[start.uid].started = True
            uids = np.frombuffer(batch.uids, dtype="<i8").tolist()
            for uid, token in zip(
                uids, np.frombuffer(batch.token_ids, dtype="<i4").tolist(), strict=True
            ):
                assert self.clients[uid].started, "a token before the request is announced"
                assert not self.clients[uid].reasons, "a token after the terminal event"
                self.clients[uid].tokens.append(token)
            for uid, reason, failure, cached in zip(
                batch.finished_uids,
                batch.finish_reasons,
                batch.failures,
                batch.num_cached_tokens,
                strict=True,
            ):
                client = self.clients[uid]
                assert not client.reasons, "two terminal events"
                client.reasons.append(reason)
                client.num_cached = cached
                message = failure.message if failure else ""
                # A step that fails by itself is a fault, of the scheduler or of the fake engine.
                assert "the engine failed: " not in message or "injected" in message, message
                client.failures.append(message)
                client.statuses.append(failure.status if failure else 0)
