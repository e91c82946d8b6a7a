"""Host and device buffers of launches, and the rule by which host buffers are reused."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class CopyEvent(Protocol):
    """The part of ``torch.cuda.Event`` that is used here."""

    def query(self) -> bool:
        """Whether all that was recorded has run."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...

    def record(self) -> None:
        """Mark this place of the current stream."""
        ...


@dataclass(frozen=True, slots=True)
class PageIndex:
    """Where a launch's rows find their queries and pages, on the device, all int32.

    Attributes:
        qo_indptr: ``[R + 1]``: first token of each row, and the end.
        kv_indptr: ``[R + 1]``: first of each row's entries in ``indices``, and the end.
        indices: pages of all rows, one after the other; what follows them is not read.
        last_page_lens: ``[R]``: tokens in each row's last page.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    indices: torch.Tensor
    last_page_lens: torch.Tensor


class HostBuffers:
    """Host memory of one slot: lengths for a planner, and the pinned memory that it copies from.

    A copy from pinned memory runs when its stream gets there, which may be long after the call.
    So: ``acquire``, then write and launch the copies, then ``release``. Acquiring waits for the
    copies of the last release; with two slots in turns they have nearly always been done, and
    the wait is a query.

    Attributes:
        schedule: pinned uint8, what a planner writes and copies to the device.
        qo_indptr, kv_indptr: int32 ``[max_rows + 1]``; the first is pinned.
        kv_lens: int32 ``[max_rows]``.
    """

    def __init__(
        self,
        max_rows: int,
        schedule_bytes: int,
        *,
        pin: bool,
        make_event: Callable[[], CopyEvent],
    ) -> None:
        self.max_rows = max_rows
        # Zeroed: planners leave gaps between their lists, and copy those too.
        self.schedule = torch.zeros(schedule_bytes, dtype=torch.uint8, pin_memory=pin)
        self.qo_indptr = torch.arange(max_rows + 1, dtype=torch.int32, pin_memory=pin)
        self.kv_indptr = torch.zeros(max_rows + 1, dtype=torch.int32)
        self.kv_lens = torch.zeros(max_rows, dtype=torch.int32)
        self._qo_indptr = self.qo_indptr.numpy()
        self._kv_indptr = self.kv_indptr.numpy()
        self._kv_lens = self.kv_lens.numpy()
        self._copied = make_event()

    def acquire(self) -> None:
        """Wait until nothing reads these buffers any more."""
        if not self._copied.query():
            self._copied.synchronize()

    def release(self) -> None:
        """Note that all copies from these buffers have been launched."""
        self._copied.record()

    def fill_kv(self, kv_lens: npt.NDArray[np.int32], page_size: int) -> int:
        """Write lengths and index pointers of rows; returns their number of pages.

        Args:
            kv_lens: int32 ``[R]``, each at least 1.
            page_size: tokens a page.
        """
        rows = len(kv_lens)
        assert rows <= self.max_rows, f"{rows} rows in a launch, room for {self.max_rows}"
        self._kv_lens[:rows] = kv_lens
        ends = self._kv_indptr[1 : rows + 1]
        np.floor_divide(kv_lens + (page_size - 1), page_size, out=ends)
        np.cumsum(ends, dtype=np.int32, out=ends)
        return int(ends[-1])

    def fill_queries(self, query_lens: npt.NDArray[np.int32]) -> int:
        """Write the index pointers of the rows' queries; returns their number of tokens.

        Without this call every row has one query.
        """
        ends = self._qo_indptr[1 : len(query_lens) + 1]
        np.cumsum(query_lens, dtype=np.int32, out=ends)
        return int(ends[-1])


class DeviceBuffers:
    """Device memory that the launches of one slot and phase use in turns.

    Written and read on one stream only, so that nothing here is overwritten too early.
    """

    def __init__(self, max_rows: int, schedule_bytes: int, device: torch.device) -> None:
        self.schedule = torch.empty(schedule_bytes, dtype=torch.uint8, device=device)
        self._qo_indptr = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._kv_indptr = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._last_page_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._indices = torch.zeros(4096, dtype=torch.int32, device=device)

    def index(self, rows: int, num_pages: int) -> PageIndex:
        """Return the index of a launch of ``rows`` rows; its contents are the caller's to write.

        ``qo_indptr`` counts up by one, unless somebody has written to it.
        """
        if num_pages > len(self._indices):
            # A power of two, so that this happens a few times in a server's life.
            self._indices = self._indices.new_zeros(1 << (num_pages - 1).bit_length())
        return PageIndex(
            qo_indptr=self._qo_indptr[: rows + 1],
            kv_indptr=self._kv_indptr[: rows + 1],
            indices=self._indices,
            last_page_lens=self._last_page_lens[:rows],
        )
