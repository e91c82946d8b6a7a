"""The waiting queue, admission, and the chunks of prompts that share a step's token budget."""

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.request_state import RequestState
from minisgl.scheduler.table import TableManager
from minisgl.scheduler.waiting import OrderName, WaitingQueue

_RETRY_EVERY = 16
"""What the prefix cache holds of a waiting request is looked up every so many steps, not in each:
for one that did not fit, in case the cache grew, and for the order of longest prefix first."""

_INITIAL_RATIO, _MIN_RATIO, _RATIO_DECAY, _RATIO_RISE = 0.3, 0.05, 0.002, 0.3
"""Share of its remaining tokens that a running request is expected to generate: it falls a little
with every step and rises with every retraction (after SGLang's new-token ratio)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start`` to ``start + length`` of a prompt, to be computed in this step."""

    request: RequestState
    start: int
    length: int
    is_last: bool


class PrefillManager:
    """Requests without a row wait here; those with one are cut into chunks.

    Args:
        table: the rows.
        cache: the pages.
        decode: running requests, whose growth admission reckons with.
        order: of admission, within a priority.
        max_scored: most tokens of prompts with log-probabilities in one step: a row of logits each.
    """

    def __init__(
        self,
        table: TableManager,
        cache: CacheManager,
        decode: DecodeManager,
        order: OrderName = "fcfs",
        *,
        max_scored: int,
    ) -> None:
        self._table = table
        self._cache = cache
        self._decode = decode
        self._max_scored = max_scored
        by_prefix = order == "longest-prefix"
        self._waiting = WaitingQueue(self._cached_tokens if by_prefix else None)
        self._ratio = _INITIAL_RATIO
        self._num_admissions = 0
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        """Tokens that the requests without a row will feed, cached prefixes included."""
        self.num_queried_tokens = 0
        """Prompt tokens that admitted requests asked the prefix cache for, since the start."""
        self.num_cached_tokens = 0
        """How many of them it supplied."""
        self.running: dict[int, RequestState] = {}
        """Requests whose prompt is not fully launched, by row, in the order of admission."""

    def enqueue(self, request: RequestState) -> None:
        """Let ``request`` wait, new or retracted; it keeps the place of its age."""
        self._waiting.push(request)
        self.num_waiting += 1
        self.num_waiting_tokens += len(request.saved_tokens)

    def forget(self, request: RequestState) -> None:
        """Drop a request that ended: at once from the chunks, lazily from the queue."""
        if request.row < 0:
            self.num_waiting -= 1
            self.num_waiting_tokens -= len(request.saved_tokens)
            self._waiting.note_ended(self.num_waiting)
        else:
            self.running.pop(request.row, None)

    def note_retraction(self) -> None:
        """Admit more carefully from now on."""
        self._ratio = min(1.0, self._ratio + _RATIO_RISE)

    def admit(self, budget: int) -> list[RequestState]:
        """Give rows to waiting requests while rows, pages and ``budget`` tokens last.

        Returns those that got one.
        """
        admitted: list[RequestState] = []
        self._num_admissions += 1
        self._ratio = max(_MIN_RATIO, self._ratio - _RATIO_DECAY)
        if not self.num_waiting or not self._table.num_free:
            return admitted
        table, rows = self._table, np.fromiter(self.running, np.int64, len(self.running))
        budget -= int((table.num_tokens[rows] - table.launched[rows]).sum())
        claimed = self._claimed_pages(rows)
        while budget > 0 and table.num_free:
            request = self._waiting.take()
            if request is None:
                break
            if not self._try_admit(request, claimed):
                if not self._waiting.note_blocked(request):
                    break
                continue
            admitted.append(request)
            self._waiting.note_admitted(request)
            row = request.row
            budget -= int(table.num_tokens[row] - table.launched[row])
            claimed += self._cache.pages_for(int(table.num_tokens[row])) - int(table.num_pages[row])
        self._waiting.put_back()
        return admitted

    def chunks(self, budget: int) -> list[Chunk]:
        """Cut the next chunks, oldest admission first, within ``budget`` tokens and free pages.

        Returned are those that end their prompts, then the others.
        A prompt whose pages do not suffice gets what is there, or waits.
        """
        table, cache = self._table, self._cache
        chunks: list[Chunk] = []
        num_available, num_scored = cache.num_available, self._max_scored
        for row, request in self.running.items():
            if budget <= 0:
                break
            start, known = int(table.launched[row]), int(table.num_tokens[row])
            room = (int(table.num_pages[row]) + num_available) * cache.page_size
            length = min(known - start, budget, room - start)
            if request.scores_prompt:
                length = min(length, num_scored)
                num_scored -= max(length, 0)
            if length <= 0:
                continue
            num_available -= cache.pages_for(start + length) - int(table.num_pages[row])
            budget -= length
            chunks.append(Chunk(request, start, length, is_last=start + length == known))
        # Those that get a token come first: nobody has to pick them out on the device.
        chunks.sort(key=lambda chunk: not chunk.is_last)
        return chunks

    def _try_admit(self, request: RequestState, claimed: int) -> bool:
        """Give a row, the cached prefix and the right to pages; undone if pages do not suffice.

        Args:
            request: a waiting one.
            claimed: pages that admitted requests will still ask for.
        """
        cache, table = self._cache, self._table
        alone = not self.running and not len(self._decode)
        short = request.min_pages + claimed > cache.num_available
        if short and not alone and self._num_admissions % _RETRY_EVERY:
            return False
        row = table.take(request)
        cached = cache.attach_prefix(request)
        known = int(table.num_tokens[row])
        expected = known + int((request.max_total_tokens - known) * self._ratio)
        needed = cache.pages_for(expected) - int(table.num_pages[row])
        if needed + claimed > cache.num_available and not alone:
            request.min_pages = needed
            cache.release(request)
            table.give_back(request)
            return False
        if request.first_launch is None:
            request.first_launch = time.monotonic()
            request.num_cached_tokens = cached
            self.num_queried_tokens += known
            self.num_cached_tokens += cached
        self.running[row] = request
        self.num_waiting -= 1
        self.num_waiting_tokens -= known
        return True

    def _cached_tokens(self, request: RequestState) -> int:
        """Return what the prefix cache holds of a waiting request, as of a few steps ago."""
        if request.scores_prompt:
            return 0
        if request.matched_at < 0 or self._num_admissions - request.matched_at >= _RETRY_EVERY:
            match = self._cache.prefix_cache.match(request.saved_tokens, request.cache_salt)
            request.matched_tokens = len(match.pages) * self._cache.page_size
            request.matched_at = self._num_admissions
        return request.matched_tokens

    def _claimed_pages(self, rows: npt.NDArray[np.int64]) -> int:
        """Pages that admitted requests will still ask for: prompts in full, outputs by estimate.

        Args:
            rows: int64: those of ``running``.
        """
        table, page_size = self._table, self._cache.page_size
        pages = (table.num_tokens[rows] + page_size - 1) // page_size
        prompts = int((pages - table.num_pages[rows]).sum())
        return prompts + self._decode.growth_estimate(self._ratio)
