"""Rebuilds rows, lengths and slots from staged bytes alone, to compare with the scheduler's own."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from minisgl.engine.info import EngineInfo
from minisgl.engine.plan import IntArray
from minisgl.engine.plan_codec import decode_plan
from minisgl.scheduler.table import TableManager


class PlanReplay:
    """What a device would know after the plans it was sent.

    Attributes:
        rows: int64 ``[R]``: the decode rows in their order.
        lengths: int64 ``[table rows]``: tokens in the pool.
        pages: int32 ``[table rows, width]``: the page table.

    Args:
        info: of the engine.
    """

    def __init__(self, info: EngineInfo) -> None:
        self._page_size = info.page_size
        width = -(-info.max_seq_len // info.page_size)
        self.rows: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.lengths = np.zeros(info.max_running_requests, dtype=np.int64)
        self.pages = np.zeros((info.max_running_requests, width), dtype=np.int32)
        self._next = 0

    def apply(self, staged: Iterable[IntArray]) -> None:
        """Take over packed plans, in order."""
        for words in staged:
            plan = decode_plan(words)
            assert plan.number == self._next, f"plan {self._next} is missing"
            self._next += 1
            rows, columns, pages = plan.table_writes.T
            self.pages[rows, columns] = pages
            if plan.decode_rows is not None:
                self.rows = plan.decode_rows.astype(np.int64)
            if plan.num_decode_rows:
                assert plan.num_decode_rows == len(self.rows), "the order of the rows is stale"
                self.lengths[self.rows] += 1
            for row, start, length, _ in plan.chunks.tolist():
                self.lengths[row] = start + length

    def slots(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return where the newest token of each row lies, int64 ``[R]``."""
        newest = self.lengths[rows] - 1
        return self.pages[rows, newest // self._page_size] * self._page_size + (
            newest % self._page_size
        )

    def compare(self, rows: npt.NDArray[np.int64], table: TableManager) -> None:
        """Compare with the scheduler's table; raises ``AssertionError`` on any difference.

        Args:
            rows: int64 ``[R]``: the decode rows of the last step, as the scheduler has them.
            table: the scheduler's.
        """
        assert np.array_equal(self.rows, rows), "rows differ"
        assert np.array_equal(self.lengths[rows], table.launched[rows]), "lengths differ"
        newest = table.launched[rows] - 1
        pages = table.pages[rows, newest // self._page_size]
        slots = pages * self._page_size + newest % self._page_size
        assert np.array_equal(self.slots(rows), slots), "slots differ"
        used = np.arange(self.pages.shape[1]) <= (newest // self._page_size)[:, None]
        assert np.array_equal(self.pages[rows][used], table.pages[rows][used]), "pages differ"
