"""Pages for the rows that go on, and who gives way when there are none."""

from collections.abc import Callable, Iterable

from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.prefill import PrefillManager
from minisgl.scheduler.request_state import RequestState
from minisgl.scheduler.table import TableManager


class RoomMaker:
    """Gives rows their next pages; retracts requests when pages run short.

    Args:
        table: the rows.
        cache: the pages.
        decode: rows that take a page each now and then.
        prefill: prompts that are not fully launched.
        retract: launch this request no more.
        drain: process the step in flight, so that everything launched is committed.
        settle: take back the pages of retracted requests of which nothing is in flight.
    """

    def __init__(
        self,
        table: TableManager,
        cache: CacheManager,
        decode: DecodeManager,
        prefill: PrefillManager,
        *,
        retract: Callable[[RequestState], None],
        drain: Callable[[], None],
        settle: Callable[[], None],
    ) -> None:
        self._table = table
        self._cache = cache
        self._decode = decode
        self._prefill = prefill
        self._retract = retract
        self._drain = drain
        self._settle = settle

    def for_decode(self) -> None:
        """Give decode rows their next page; retract requests if that is not to be had."""
        num_rows = len(self._decode)
        if not num_rows:
            return
        # A row takes at most one page a step: with two for each nothing has to be counted.
        if self._cache.num_available < 2 * num_rows:
            self._relieve_pressure()
        growing, columns = self._decode.grow()
        if len(growing):
            self._cache.extend_by_one(growing, columns)

    def for_oldest_prompt(self) -> None:
        """Let the oldest request's prompt go on when the pool is full: others are retracted."""
        if not self._prefill.running or self._cache.num_available:
            return
        oldest = min(self._active(), key=lambda request: request.order)
        row, table = oldest.row, self._table
        if row not in self._prefill.running:
            return
        if table.launched[row] < table.num_pages[row] * self._cache.page_size:
            return
        self._drain()
        while not self._cache.num_available and self._retract_one():
            self._settle()

    def _relieve_pressure(self) -> None:
        """Retract requests until decode rows have pages for this step and the next.

        Looks one step ahead, so that a victim's token in flight is committed meanwhile. When the
        pages of this step itself are short, the pipeline drains once.
        """
        decode, cache = self._decode, self._cache
        if decode.pages_short(1).sum() > cache.num_available:
            self._drain()
            while decode.pages_short(1).sum() > cache.num_available and self._retract_one():
                self._settle()
            return
        promised = 0
        while decode.pages_short(2).sum() > cache.num_available + promised:
            victim = self._retract_one()
            if victim is None:
                break
            promised += int(self._table.num_pages[victim.row])
        self._settle()

    def _retract_one(self) -> RequestState | None:
        """Choose a victim and retract it; ``None`` if only the oldest is left."""
        victim = choose_victim(self._active())
        if victim is not None:
            self._retract(victim)
        return victim

    def _active(self) -> list[RequestState]:
        """Requests with a row that go on: prefilling ones, then decoding ones."""
        decoding = (self._table.owner(row) for row in self._decode.rows.tolist())
        return [*self._prefill.running.values(), *decoding]


def choose_victim(active: Iterable[RequestState]) -> RequestState | None:
    """Return who is retracted: lowest priority, then newest, never the oldest of all.

    Returns ``None`` if nobody but the oldest is left.
    """
    candidates = [request for request in active if not request.retracting]
    if len(candidates) < 2:
        return None
    oldest = min(candidates, key=lambda request: request.order)
    others = (request for request in candidates if request is not oldest)
    return min(others, key=lambda request: (request.priority, -request.order))
