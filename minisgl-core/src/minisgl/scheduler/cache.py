"""Pages: which are free, which the prefix cache holds, which belong to one request."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from minisgl.engine.plan import NO_WRITES, IntArray
from minisgl.kvcache.interface import PageArray, PrefixCache
from minisgl.scheduler.free_pages import FreePages
from minisgl.scheduler.request_state import RequestState
from minisgl.scheduler.table import TableManager

_EVICT_SHARE, _MAX_EVICT_AHEAD = 256, 256
"""With a full pool every step would evict a few pages: this share of all is evicted along with
them, so that the steps that follow find free ones."""


class CacheManager:
    """Owns every page of the pool except the dummy page 0.

    Each page is in exactly one place: the free list, the prefix cache, or one request's private
    columns. Table entries change only here, and each change is noted for the next plan.

    Attributes:
        num_inserts: how often running requests may have been moved onto cached pages.

    Args:
        num_pages: pages to hand out: ids 1 to ``num_pages``.
        page_size: tokens a page.
        prefix_cache: what shares pages between requests.
        table: the rows.
    """

    def __init__(
        self, num_pages: int, page_size: int, prefix_cache: PrefixCache, table: TableManager
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self._table = table
        self._free = FreePages(num_pages)
        self._writes: list[IntArray] = []
        self.num_inserts = 0
        self._evict_ahead = min(num_pages // _EVICT_SHARE, _MAX_EVICT_AHEAD)

    @property
    def num_free(self) -> int:
        """Pages on the free list."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that ``extend`` can give: free ones and those that can be evicted."""
        return len(self._free) + self.prefix_cache.num_evictable_pages

    def pages_for(self, num_tokens: int) -> int:
        """Return the pages that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.page_size)

    def attach_prefix(self, request: RequestState) -> int:
        """Lock the longest cached prefix of a request that just got a row; returns its tokens.

        The row's lengths then start behind it: at least one token is left to compute. A request
        that wants log-probabilities of its prompt computes all of it.
        """
        row, table = request.row, self._table
        # At least one token is never matched, so of one token nothing is.
        known = 1 if request.scores_prompt else int(table.num_tokens[row])
        match = self.prefix_cache.match(table.tokens[row, :known], request.cache_salt)
        request.prompt_logprobs.clear()
        self.prefix_cache.lock(match.handle)
        request.handle = match.handle
        request.num_shared_pages = num_pages = len(match.pages)
        self._write_front(row, 0, match.pages)
        table.num_pages[row] = num_pages
        table.launched[row] = table.committed[row] = num_pages * self.page_size
        return num_pages * self.page_size

    def extend(self, row: int, num_tokens: int) -> None:
        """Give ``row`` the pages that it lacks for ``num_tokens`` tokens.

        They must be available: the caller has counted, or retracted somebody.
        """
        first, needed = int(self._table.num_pages[row]), self.pages_for(num_tokens)
        if needed > first:
            self._write_front(row, first, self._allocate(needed - first))
            self._table.num_pages[row] = needed

    def extend_by_one(self, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]) -> None:
        """Give each of ``rows`` its next page, at ``columns``; so many must be available."""
        table, pages = self._table, self._allocate(len(rows))
        table.pages[rows, columns] = pages
        table.num_pages[rows] = columns + 1
        self._note(rows, columns, pages)

    def cache_prefix(self, request: RequestState) -> None:
        """Insert a running request's committed whole pages and move it onto canonical ones."""
        row, table = request.row, self._table
        num_full = int(table.committed[row]) // self.page_size
        if num_full <= request.num_shared_pages:
            return
        self.num_inserts += 1
        match = self.prefix_cache.insert(
            table.tokens[row, : num_full * self.page_size],
            table.pages[row, :num_full],
            request.cache_salt,
        )
        self.prefix_cache.lock(match.handle)
        self.prefix_cache.unlock(request.handle)
        request.handle = match.handle
        self._drop_duplicates(request, match.pages, rewrite=True)
        request.num_shared_pages = max(len(match.pages), request.num_shared_pages)

    def release(self, request: RequestState) -> None:
        """Take all pages of a request that will not run on; whole committed ones stay cached."""
        row, table = request.row, self._table
        num_full = int(table.committed[row]) // self.page_size
        held = request.num_shared_pages
        if num_full > held:
            match = self.prefix_cache.insert(
                table.tokens[row, : num_full * self.page_size],
                table.pages[row, :num_full],
                request.cache_salt,
            )
            self._drop_duplicates(request, match.pages, rewrite=False)
            held = max(held, len(match.pages))
        self._free.give_back(table.pages[row, held : table.num_pages[row]])
        self.prefix_cache.unlock(request.handle)
        request.handle = None
        request.num_shared_pages = 0
        table.num_pages[row] = 0

    def take_writes(self) -> IntArray:
        """Return and forget the table writes since the last call, int32 ``[n, 3]``.

        Each is (row, column, page), and each entry is there once.
        """
        batches, self._writes = self._writes, []
        if len(batches) < 2:
            return batches[0] if batches else NO_WRITES
        writes = np.concatenate(batches)
        # Of two writes to one entry only the later one counts.
        width = self._table.pages.shape[1]
        entries = writes[::-1, 0].astype(np.int64) * width + writes[::-1, 1]
        _, last = np.unique(entries, return_index=True)
        return writes if len(last) == len(writes) else writes[len(writes) - 1 - last]

    def check(self, owners: Iterable[RequestState]) -> None:
        """Recount all pages; raises ``AssertionError`` unless each is in exactly one place."""
        self.prefix_cache.check()
        private: list[int] = []
        for request in owners:
            columns = slice(request.num_shared_pages, self._table.num_pages[request.row])
            private.extend(self._table.pages[request.row, columns].tolist())
        counted = len(self._free) + self.prefix_cache.num_pages + len(private)
        assert counted == self.num_pages, f"{counted} pages of {self.num_pages} are accounted for"
        distinct = set(self._free.pages().tolist()) | set(private)
        assert len(distinct) == len(self._free) + len(private), "a page has two owners"

    def _allocate(self, num_pages: int) -> PageArray:
        missing = num_pages - len(self._free)
        if missing > 0:
            self._free.give_back(self.prefix_cache.evict(missing + self._evict_ahead))
        return self._free.take(num_pages)

    def _write_front(self, row: int, first_column: int, pages: PageArray) -> None:
        """Set consecutive entries of one row."""
        if len(pages):
            self._table.pages[row, first_column : first_column + len(pages)] = pages
            self._note(row, np.arange(first_column, first_column + len(pages)), pages)

    def _note(
        self, rows: int | npt.NDArray[np.int64], columns: npt.NDArray[np.int64], pages: PageArray
    ) -> None:
        """Remember table writes for the next plan."""
        writes = np.empty((len(pages), 3), dtype=np.int32)
        writes[:, 0] = rows
        writes[:, 1] = columns
        writes[:, 2] = pages
        self._writes.append(writes)

    def _drop_duplicates(
        self, request: RequestState, canonical: PageArray, *, rewrite: bool
    ) -> None:
        """Free the request's own pages where the cache holds another one for the same tokens."""
        row, first = request.row, request.num_shared_pages
        own = self._table.pages[row, : len(canonical)]
        columns = (own[first:] != canonical[first:]).nonzero()[0] + first
        if not len(columns):
            return
        self._free.give_back(own[columns])
        if rewrite:
            self._table.pages[row, columns] = canonical[columns]
            self._note(row, columns, canonical[columns])
