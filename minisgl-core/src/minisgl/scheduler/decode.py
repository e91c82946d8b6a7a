"""Running requests: who decodes next, and who has to give way."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from minisgl.scheduler.request_state import RequestState
from minisgl.scheduler.table import TableManager


class DecodeManager:
    """Rows whose prompts are launched, in the explicit order in which they came.

    Args:
        table: the rows.
        page_size: tokens a page.
    """

    def __init__(self, table: TableManager, page_size: int) -> None:
        self._table = table
        self._page_size = page_size
        self._order: dict[int, None] = {}
        self._rows: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self._order)

    @property
    def rows(self) -> npt.NDArray[np.int32]:
        """All rows, int32, in order; made anew only after a change."""
        if self._rows is None:
            self._rows = np.fromiter(self._order, dtype=np.int32, count=len(self._order))
        return self._rows

    def add(self, row: int) -> None:
        """Append a row whose last prompt token is launched."""
        self._order[row] = None
        self._rows = None

    def discard(self, row: int) -> None:
        """Take a row out, if it is here."""
        if self._order.pop(row, 0) is None:
            self._rows = None

    def launchable(self) -> npt.NDArray[np.int32]:
        """Return the rows to feed next: not those whose last allowed token is in flight."""
        rows = self.rows
        more = self._table.launched[rows] + 1 < self._table.end[rows]
        return rows if more.all() else rows[more]

    def pages_short(self, rows: npt.NDArray[np.int32], num_steps: int) -> npt.NDArray[np.int64]:
        """Return the pages that each row lacks for its next ``num_steps`` tokens, int64 ``[R]``."""
        table = self._table
        tokens = np.minimum(table.launched[rows] + num_steps, table.end[rows] - 1)
        needed = (tokens + self._page_size - 1) // self._page_size
        return np.maximum(needed - table.num_pages[rows], 0)

    def growth_estimate(self, ratio: float) -> int:
        """Return the pages that all rows may yet ask for, if each makes ``ratio`` of its rest."""
        rows, table = self.rows, self._table
        rest = np.maximum(table.end[rows] - table.launched[rows], 0) * ratio
        tokens = table.launched[rows] + rest.astype(np.int64)
        pages = (tokens + self._page_size - 1) // self._page_size
        return int(np.maximum(pages - table.num_pages[rows], 0).sum())


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
