"""The scheduler: receive, choose, launch, process the previous result.

Everything about a request's state follows a few rules (``docs/architecture.md`` has them all):
scheduling reads launched lengths, everything that a user sees reads committed ones; what ends a
request only sets a terminal reason, and its row and pages go in ``_settle`` once none of its
launches is unprocessed.
"""

import gc
import logging
import time
import weakref
from functools import partial

import numpy as np
import numpy.typing as npt

from minisgl.engine.logits_bound import max_scored_tokens
from minisgl.errors import EngineLostError, RequestError
from minisgl.kvcache.interface import PrefixCache
from minisgl.message import (
    AbortRequest,
    BackendMessage,
    Failure,
    GenerateRequest,
    Ping,
    Pong,
    Shutdown,
    StopFound,
)
from minisgl.request import FinishReason
from minisgl.scheduler.admission import check_queue, validate
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.commit import Committer
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.early_aborts import EarlyAborts
from minisgl.scheduler.grammars import Ending, Grammars
from minisgl.scheduler.interfaces import Observers, StepEngine
from minisgl.scheduler.launch import LaunchBuilder, LaunchedStep, Masks
from minisgl.scheduler.output import OutputCollector
from minisgl.scheduler.policy import PolicyName, make_policy
from minisgl.scheduler.prefill import Chunk, PrefillManager
from minisgl.scheduler.request_state import RequestState
from minisgl.scheduler.room import RoomMaker
from minisgl.scheduler.sharing import PrefixSharing
from minisgl.scheduler.stats import request_stats, step_stats
from minisgl.scheduler.table import TableManager
from minisgl.scheduler.token_times import TokenTimes
from minisgl.scheduler.transport import Transport
from minisgl.scheduler.waiting import OrderName
from minisgl.structured.compiler import GrammarCompiler

logger = logging.getLogger(__name__)

_MAX_FAILED_STEPS = 3
"""So many failed steps in a row mean that the engine is broken, not a request."""

_STEPS_OF_GARBAGE = 1000
"""After so many steps an idle scheduler collects reference cycles, which others may have left."""

_COMPILE_CHECK_S = 0.002
"""A scheduler that has nothing to do but wait for grammars looks this often for messages."""

_IDLE_CHECK_S = 1.0
"""An idle scheduler looks this often whether its engine is still there."""


class Scheduler:
    """Serves requests from a transport with an engine, one step after another.

    Args:
        engine: runs the steps.
        prefix_cache: shares pages between requests.
        transport: brings messages and takes tokens away.
        max_step_tokens: token budget of a step: decode rows first, then prompt chunks. A waiting
            prompt always gets one page, so a step computes at most the larger of the budget and
            the decode rows plus one page.
        overlap: process the previous step's result while the current one runs.
        mixed: put decode rows and prompt chunks into one launch.
        policy: how a step is shared between decode rows and prompts.
        order: of admission, within a priority.
        seed: of the noise of requests that bring no seed.
        observers: told about finished steps and requests.
        compiler: of the grammars that requests bring; without one they are refused.
        max_queued_tokens: most prompt tokens that wait; requests beyond them are refused.
    """

    def __init__(
        self,
        engine: StepEngine,
        prefix_cache: PrefixCache,
        transport: Transport,
        *,
        max_step_tokens: int,
        overlap: bool,
        mixed: bool,
        policy: PolicyName = "decode-first",
        order: OrderName = "fcfs",
        seed: int = 0,
        observers: Observers | None = None,
        compiler: GrammarCompiler | None = None,
        max_queued_tokens: int | None = None,
    ) -> None:
        info = self.info = engine.info
        self._engine = engine
        self._transport = transport
        self._policy = make_policy(policy, max_step_tokens, info.page_size)
        self._overlap = overlap
        self._max_queued_tokens = max_queued_tokens
        self._observers = observers
        self._random = np.random.default_rng(seed)
        self.table = TableManager(info.max_running_requests, info.max_seq_len, info.page_size)
        self.cache = CacheManager(info.num_pages, info.page_size, prefix_cache, self.table)
        self._decode = DecodeManager(self.table, info.page_size)
        self._prefill = PrefillManager(
            self.table,
            self.cache,
            self._decode,
            order,
            max_scored=max_scored_tokens(info.vocab_size, info.page_size),
        )
        # Not bound methods: a cycle would keep the engine's memory until the collector comes by.
        loop = weakref.proxy(self)
        self._room = RoomMaker(
            self.table,
            self.cache,
            self._decode,
            self._prefill,
            retract=partial(Scheduler._retract, loop),
            drain=partial(Scheduler._drain, loop),
            settle=partial(Scheduler._settle, loop),
        )
        self._launches = LaunchBuilder(
            self.table,
            self.cache,
            self._decode,
            info.vocab_size,
            info.eos_token_ids,
            sharing=PrefixSharing(self.table, info.page_size, info.shared_prefix_min_tokens),
            mixed=mixed,
        )
        self._compiler = compiler or GrammarCompiler(None, off="there is no grammar engine")
        self._grammars = Grammars(self._compiler, info)
        self._num_masked = 0
        self._output = OutputCollector()
        self._times: TokenTimes | None = None
        if observers is not None and observers.has_request_observers:
            self._times = TokenTimes(info.max_running_requests, info.max_seq_len)
        self._committer = Committer(
            self.table,
            self.cache,
            self._output,
            info.vocab_size,
            info.eos_token_ids,
            times=self._times,
        )
        self._requests: dict[int, RequestState] = {}
        self._leaving: list[RequestState] = []
        self._added: list[RequestState] = []
        self._early_aborts = EarlyAborts()
        self._pending: LaunchedStep | None = None
        self._stopping = False
        self._draining = False
        self._num_accepted = 0
        self._num_ended = 0
        self._num_failed_steps = 0
        self._drained_s = 0.0
        self.num_processed_steps = 0
        self._collected_at = 0
        self.num_retractions = 0

    @property
    def engine(self) -> StepEngine:
        """What runs the steps, for measurements."""
        return self._engine

    @property
    def has_work(self) -> bool:
        """Whether a step would do something: a request is alive, or a result is unprocessed."""
        return bool(self._requests or self._pending or self._leaving)

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return self.info.max_running_requests - self.table.num_free

    @property
    def decode_rows(self) -> npt.NDArray[np.int64]:
        """Rows that decode with the next step, int64 ``[R]``, in their order."""
        return self._decode.rows

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self._prefill.num_waiting

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait for a row, or for their grammar."""
        return self._prefill.num_waiting_tokens + self._grammars.num_waiting_tokens

    def run(self) -> None:
        """Serve until a ``Shutdown`` arrives; with nothing to do it sleeps on the transport."""
        while True:
            if self.has_work:
                self.receive(0)
            else:
                self._engine.check_alive()
                self.receive(_IDLE_CHECK_S)
                if not self.has_work:
                    self._collect_garbage()
            if self._stopping and not (self._draining and self._requests):
                break
            self.step()
        for request in list(self._requests.values()):
            self._finish(request, FinishReason.ABORT)
        while self.has_work:
            self.step()
        self._flush()

    def _collect_garbage(self) -> None:
        """Look for reference cycles now that nobody waits; the loop itself makes none."""
        if self.num_processed_steps - self._collected_at > _STEPS_OF_GARBAGE:
            self._collected_at = self.num_processed_steps
            gc.collect()

    def receive(self, timeout: float | None = 0) -> None:
        """Take in the messages that wait; see ``Transport.receive`` for ``timeout``."""
        for message in self._transport.receive(timeout):
            self._handle(message)
        self._flush()

    def step(self) -> bool:
        """Plan and launch one step and process a result: the previous one's when overlapping.

        Returns whether anything was done.
        """
        if self._grammars.num_compiling:
            self._take_compiled()
        launched = self._launch_step()
        if self._overlap:
            done, self._pending = self._pending, launched
        else:
            done = launched
        if done is not None:
            self._process(done)
        self._settle()
        self._flush()
        if launched is None and done is None and self._grammars.num_compiling:
            self._grammars.wait(_COMPILE_CHECK_S)
        return launched is not None or done is not None

    def close(self) -> None:
        """Stop what the engines run outside of this process. Safe to call twice."""
        self._compiler.close()
        self._engine.close()

    def check(self) -> None:
        """Recount pages and rows; raises ``AssertionError`` if the state is inconsistent."""
        owners = [request for request in self.table.requests if request is not None]
        self.cache.check(owners)
        assert len(owners) == self.num_running

    # Messages

    def _handle(self, message: BackendMessage) -> None:
        match message:
            case GenerateRequest():
                self._accept(message)
            case AbortRequest():
                for uid in message.uids:
                    self._abort(uid)
            case StopFound():
                request = self._requests.get(message.uid)
                if request is not None:
                    self._finish(request, FinishReason.STOP, num_tokens=message.num_tokens)
            case Ping():
                self._transport.pong(self._heartbeat(message.sequence))
            case Shutdown():
                self._stopping = True
                self._draining = message.drain

    def _accept(self, message: GenerateRequest) -> None:
        if message.uid in self._requests:
            logger.error("request %d was sent twice; the second one is dropped", message.uid)
            return
        failure, max_total = None, 0
        try:
            max_total = validate(message, self.info)
            check_queue(len(message.prompt), self.num_queued_tokens, self._max_queued_tokens)
        except RequestError as error:
            failure = Failure(error.message, error.status, error.param, error.code)
        params = message.params
        seed = params.seed
        request = RequestState(
            uid=message.uid,
            order=self._num_accepted,
            params=params,
            priority=message.priority,
            cache_salt=message.cache_salt,
            prompt_tail=message.prompt_tail,
            seed=int(self._random.integers(2**63)) if seed is None else seed,
            num_prompt_tokens=len(message.prompt),
            max_total_tokens=max_total,
            arrival=time.monotonic(),
            saved_tokens=message.prompt.astype(np.int32),
            stop_token_ids=frozenset(params.stop_token_ids),
        )
        self._num_accepted += 1
        self._requests[message.uid] = request
        if failure is None and params.grammar is not None:
            failure = self._grammars.begin(request)
        if not request.compiling:
            self._prefill.enqueue(request)
        if failure is not None:
            self._finish(request, FinishReason.ERROR, failure=failure)
        elif self._early_aborts.take(message.uid):
            self._finish(request, FinishReason.ABORT)

    def _abort(self, uid: int) -> None:
        request = self._requests.get(uid)
        if request is None:
            self._early_aborts.add(uid)
        else:
            self._finish(request, FinishReason.ABORT)

    def _heartbeat(self, sequence: int) -> Pong:
        return Pong(
            sequence=sequence,
            num_steps=self.num_processed_steps,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_free_pages=self.cache.num_available,
            num_pages=self.cache.num_pages,
            num_retracted=self.num_retractions,
            num_queried_tokens=self._prefill.num_queried_tokens,
            num_cached_tokens=self._prefill.num_cached_tokens,
        )

    # Choosing

    def _launch_step(self) -> LaunchedStep | None:
        """Choose rows and chunks, and launch them; ``None`` if there is nothing to run."""
        began, self._drained_s = time.perf_counter(), 0.0
        self._room.for_decode()
        num_prompts = self._prefill.num_waiting + len(self._prefill.running)
        budget = self._policy.prefill_budget(len(self._decode), num_prompts)
        admitted = self._prefill.admit(budget)
        self._added.extend(admitted)
        if self._times is not None:
            for request in admitted:
                self._times.open(request)
        self._room.for_oldest_prompt()
        chunks, num_decode = self._prefill.chunks(budget), self._decode.num_ready
        run_decode, masks = self._policy.runs_decode(num_decode, len(chunks)), None
        if self._num_masked:
            masks = self._fill_masks(chunks, run_decode=run_decode)
            chunks = [chunk for chunk in chunks if chunk.request.terminal is None]
            num_decode = self._decode.num_ready
        if not chunks and not (num_decode and run_decode):
            return None
        step = self._launches.build(
            self._take_added(),
            chunks,
            run_decode=run_decode,
            num_ended=self._num_ended,
            masks=masks,
        )
        for chunk in chunks:
            if chunk.is_last:
                del self._prefill.running[chunk.request.row]
        planned = time.perf_counter()
        step.host_s = planned - began - self._drained_s
        try:
            step.result = self._engine.forward_batch(step.plan)
        except EngineLostError:
            raise
        except Exception as error:  # noqa: BLE001  (what fails a step must not end the server)
            self._process_pending()
            self._fail_step(step, error)
            return None
        if self.info.asynchronous:  # else it has computed the step, which is not the host's work
            step.host_s += time.perf_counter() - planned
        return step

    def _fill_masks(self, chunks: list[Chunk], *, run_decode: bool) -> Masks | None:
        """Say what may come next in masked rows that get a token; some requests end instead."""
        rows = self._decode.ready_masked.tolist() if run_decode else []
        decoding = [self.table.owner(row) for row in rows]
        sampled = [c.request for c in chunks if c.is_last and c.request.grammar is not None]
        words = np.zeros((len(decoding) + len(sampled), self._grammars.num_words), dtype=np.int32)
        kept: list[RequestState] = []
        for request in (*decoding, *sampled):
            num_output = int(self.table.num_tokens[request.row]) - request.num_prompt_tokens
            ending = self._grammars.fill(request, num_output, words[len(kept)])
            if ending is None:
                kept.append(request)
            else:
                self._end_by_grammar(request, ending)
        if not kept:
            return None
        num_decoding = sum(request.terminal is None for request in decoding)
        return Masks(kept[:num_decoding], kept[num_decoding:], words[: len(kept)])

    def _end_by_grammar(self, request: RequestState, ending: Ending) -> None:
        if isinstance(ending, Failure):
            self._finish(request, FinishReason.ERROR, failure=ending)
        else:
            self._finish(request, ending)

    def _take_compiled(self) -> None:
        """Let requests whose grammar is compiled join the queue; those whose is not end."""
        for request, failure in self._grammars.take_compiled():
            self._prefill.enqueue(request)
            if request.grammar is not None:
                self._num_masked += 1
            if failure is not None:
                self._finish(request, FinishReason.ERROR, failure=failure)

    def _retract(self, victim: RequestState) -> None:
        """Launch ``victim`` no more; it waits again once nothing of it is in flight."""
        logger.debug("request %d is retracted: the KV pool is full", victim.uid)
        victim.retracting = True
        victim.num_retractions += 1
        self.num_retractions += 1
        self._prefill.running.pop(victim.row, None)
        self._prefill.note_retraction()
        self._decode.discard(victim.row)
        self._leaving.append(victim)

    def _take_added(self) -> list[RequestState]:
        """Return the owners of rows that got a new one since the last plan."""
        added, self._added = self._added, []
        owners = {request.row: request for request in added if request.row >= 0}
        return list(owners.values())

    # Results

    def _drain(self) -> None:
        """Process the step in flight now, so that everything launched is committed."""
        began = time.perf_counter()
        self._process_pending()
        self._settle()
        self._drained_s += time.perf_counter() - began

    def _process_pending(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._process(pending)

    def _process(self, step: LaunchedStep) -> None:
        """Commit a step's tokens and end the requests that are done."""
        assert step.result is not None
        try:
            tokens = step.result.tokens()
        except EngineLostError:
            raise
        except Exception as error:  # noqa: BLE001  (what fails a step must not end the server)
            self._fail_step(step, error)
            return
        began = time.perf_counter()
        self._num_failed_steps = 0
        self._decode.num_processed = step.plan.number
        reports = step.result.reports()
        for request, reason in self._committer.commit(step, tokens, reports, self._num_ended):
            self._finish(request, reason)
        for request, place in step.masked:
            if request.terminal is None:
                ending = self._grammars.accept(request, int(tokens[place]))
                if ending is not None:
                    self._end_by_grammar(request, ending)
        self.num_processed_steps += 1
        if self._observers is not None and self._observers.has_step_observers:
            self._observers.step_finished(
                step_stats(
                    step.plan,
                    self.cache,
                    self._prefill,
                    num_running=self.num_running,
                    num_retracted=self.num_retractions,
                    host_s=step.host_s + time.perf_counter() - began,
                )
            )

    def _fail_step(self, step: LaunchedStep, error: Exception) -> None:
        """End every request of a failed step with an error; the others go on."""
        self._num_failed_steps += 1
        if self._num_failed_steps >= _MAX_FAILED_STEPS:
            raise error
        logger.error("a step failed; its requests end with an error", exc_info=error)
        self._decode.num_processed = step.plan.number
        rows = [] if step.decode is None else step.decode.rows.tolist()
        requests = [self.table.owner(row) for row in rows]
        for request in [*requests, *(chunk.request for chunk in step.chunks)]:
            if request.terminal is None:
                failure = Failure(f"the engine failed: {error}", status=500)
                self._finish(request, FinishReason.ERROR, failure=failure)

    def _finish(
        self,
        request: RequestState,
        reason: FinishReason,
        *,
        num_tokens: int | None = None,
        failure: Failure | None = None,
    ) -> None:
        """Set the terminal reason and send the one terminal event; resources go in ``_settle``."""
        assert request.terminal is None, "a request ends once"
        self._num_ended += 1
        known = len(request.saved_tokens)
        if request.row >= 0:
            known = int(self.table.num_tokens[request.row])
            self.table.live[request.row] = False
        output = known - request.num_prompt_tokens
        request.terminal = reason
        request.failure = failure
        request.num_output_tokens = output if num_tokens is None else min(num_tokens, output)
        del self._requests[request.uid]
        if request.grammar is not None:
            self._num_masked -= 1
        if request.compiling:
            self._grammars.forget(request)
        elif not request.retracting:
            self._prefill.forget(request)
            if request.row >= 0:
                self._decode.discard(request.row)
                self._leaving.append(request)
        self._output.finish(request)
        if self._observers is not None and self._times is not None:
            gaps = self._times.of(request, request.num_output_tokens)
            self._observers.request_finished(request_stats(request, gaps))

    def _settle(self) -> None:
        """Take back rows and pages of leaving requests of which nothing is in flight."""
        if not self._leaving:
            return
        still_flying: list[RequestState] = []
        for request in self._leaving:
            if self.table.last_step[request.row] > self._decode.num_processed:
                still_flying.append(request)
                continue
            self.cache.release(request)
            if self._times is not None and request.terminal is None:
                num_tokens = int(self.table.num_tokens[request.row])
                self._times.close(request, num_tokens - request.num_prompt_tokens)
            self.table.give_back(request)
            if request.terminal is None:
                request.retracting = False
                self._prefill.enqueue(request)
        self._leaving = still_flying

    def _flush(self) -> None:
        batch = self._output.take()
        if batch is not None:
            self._transport.send(batch)
