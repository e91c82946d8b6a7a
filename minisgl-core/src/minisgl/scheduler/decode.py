"""Running requests: who decodes next."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minisgl.scheduler.table import TableManager

RowArray = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.int32]


@dataclass(slots=True)
class DecodeSet:
    """The decode rows between two changes; computed once, used by every step until the next one.

    All arrays are in the order of the rows, so that a step reads and writes them from end to end.

    Attributes:
        rows: int64 ``[R]``, in order.
        rows32: the same as a plan carries them.
        uids: int64 ``[R]``.
        uid_bytes: the same as the detokenizer gets them.
        watched: int64 ``[W]``: places of rows with stop tokens of their own.
        stop_ids: int32 ``[W, n]``: those tokens, padded with -1.
        obeys_eos: bool ``[R]``: the model's end-of-sequence tokens end the row.
        lengths: int64 ``[R]``: launched lengths, replaced by every launch.
        full_at: int64 ``[R]``: lengths at which the rows' pages are full.
    """

    rows: RowArray
    rows32: IntArray
    uids: RowArray
    uid_bytes: bytes
    watched: RowArray
    stop_ids: IntArray
    obeys_eos: npt.NDArray[np.bool_]
    lengths: RowArray
    full_at: RowArray


class DecodeManager:
    """Rows whose prompts are launched and that need more tokens, in the order in which they came.

    Every decode launch feeds all of them, so each grows by one token at a time. Nothing here costs
    time for a step in which no row comes or goes: when the next row's last token will be launched
    is known beforehand.

    Masked rows are the exception: the host must know such a row's last token before it can say
    which may come next. They follow the others in the order, and sit out launches while a token of
    theirs is in flight: with overlap they take part in every second one, all of them in the same.

    Args:
        table: the rows.
        page_size: tokens a page.

    Attributes:
        num_processed: number of the last step whose tokens are committed.
    """

    def __init__(self, table: TableManager, page_size: int) -> None:
        self._table = table
        self._page_size = page_size
        self._is_member = np.zeros(len(table.requests), dtype=np.bool_)
        self._rows: RowArray = np.empty(0, dtype=np.int64)
        self._added: list[int] = []
        self._current: DecodeSet | None = None
        self._launches_left = 0
        self.num_processed = -1
        self._masked_rows: RowArray = np.empty(0, dtype=np.int64)
        self._unready: list[int] = []
        self._masked_step = -1
        self._with_masked = False

    def __len__(self) -> int:
        return len(self._rows) + len(self._added) + len(self._masked_rows) + len(self._unready)

    @property
    def rows(self) -> RowArray:
        """All rows, int64 ``[R]``: those of ``current``, then those that sit it out."""
        rows = self.current().rows
        if not self._has_masked:
            return rows
        others = self._masked_rows[:0] if self._with_masked else self._masked_rows
        return np.concatenate((rows, others, np.array(self._unready, dtype=np.int64)))

    @property
    def num_ready(self) -> int:
        """Rows that the next launch feeds."""
        return len(self.current().rows) if self._has_masked else len(self)

    @property
    def ready_masked(self) -> RowArray:
        """Masked rows that the next launch feeds, int64, in their order."""
        return self._masked_rows if self._with_masked else self._masked_rows[:0]

    @property
    def _has_masked(self) -> bool:
        return bool(len(self._masked_rows) or self._unready)

    def current(self) -> DecodeSet:
        """Return the rows of the next launch and what is derived from them.

        The same object until one comes or goes.
        """
        if self._current is None:
            if self._added:
                self._rows = np.concatenate((self._rows, np.array(self._added, dtype=np.int64)))
                self._added = []
            table, rows = self._table, self._rows
            if self._with_masked:
                rows = np.concatenate((rows, self._masked_rows))
            uids, lengths = table.uids[rows], table.launched[rows]
            left = table.end[rows] - lengths - 1
            watched = (table.num_stop_ids[rows] > 0).nonzero()[0]
            width = int(table.num_stop_ids[rows[watched]].max()) if len(watched) else 0
            self._launches_left = int(left.min()) if len(rows) else 0
            self._current = DecodeSet(
                rows=rows,
                rows32=rows.astype(np.int32),
                uids=uids,
                uid_bytes=uids.astype("<i8").tobytes(),
                watched=watched,
                stop_ids=table.stop_ids[rows[watched], :width],
                obeys_eos=~table.ignore_eos[rows],
                lengths=lengths,
                full_at=table.num_pages[rows] * self._page_size,
            )
        return self._current

    def add(self, row: int, *, masked: bool = False) -> None:
        """Append a row whose last prompt token is launched; not one that needs just that token."""
        if self._table.launched[row] + 1 < self._table.end[row]:
            self._is_member[row] = True
            if masked:
                self._unready.append(row)
            else:
                self._added.append(row)
                self._current = None

    def discard(self, row: int) -> None:
        """Take a row out, if it is here."""
        if not self._is_member[row]:
            return
        self._is_member[row] = False
        self._current = None
        if row in self._unready:
            self._unready.remove(row)
        elif row in self._added:
            self._added.remove(row)
        else:
            self._rows = self._rows[self._rows != row]
            self._masked_rows = self._masked_rows[self._masked_rows != row]

    def launch(self, number: int) -> tuple[DecodeSet, RowArray, RowArray | None]:
        """Advance the launched lengths of all rows by the launch of step ``number``.

        Rows whose last allowed token is in flight now leave.

        Returns:
            The rows launched, their lengths after it, and the places of those that leave or
            ``None``.
        """
        launched, table = self.current(), self._table
        rows = launched.rows
        launched.lengths = ends = launched.lengths + 1
        table.launched[rows] = ends
        table.last_step[rows] = number
        num_masked = len(rows) - len(self._rows)
        if num_masked:
            self._masked_step = number
            self._with_masked = False
            self._current = None
        self._launches_left -= 1
        if self._launches_left > 0:
            return launched, ends, None
        stays = table.launched[rows] + 1 < table.end[rows]
        self._is_member[rows[~stays]] = False
        split = len(self._rows)
        self._rows = rows[:split][stays[:split]]
        if num_masked:
            self._masked_rows = rows[split:][stays[split:]]
        self._current = None
        return launched, ends, (~stays).nonzero()[0]

    def pages_short(self, num_steps: int) -> npt.NDArray[np.int64]:
        """Return the pages that each row lacks for its next ``num_steps`` tokens, int64 ``[R]``."""
        rows, table = self.rows, self._table
        tokens = np.minimum(table.launched[rows] + num_steps, table.end[rows] - 1)
        needed = (tokens + self._page_size - 1) // self._page_size
        return np.maximum(needed - table.num_pages[rows], 0)

    def grow(self) -> tuple[RowArray, RowArray]:
        """Return the rows whose next token needs a new page; they must get it now.

        Decides which rows the next launch feeds: afterwards rows may leave it, but none comes.

        Returns:
            The rows, and the columns of the page table where that page goes, int64 both.
        """
        if self._has_masked:
            self._turn()
        current, page_size = self.current(), self._page_size
        full = current.lengths == current.full_at
        if full.all():  # as always with pages of one token
            current.full_at += page_size
            columns = current.lengths if page_size == 1 else current.lengths // page_size
            return current.rows, columns
        places = full.nonzero()[0]
        current.full_at[places] += page_size
        return current.rows[places], current.lengths[places] // page_size

    def _turn(self) -> None:
        """Let masked rows join the next launch if all of their tokens are committed."""
        table, processed = self._table, self.num_processed
        known = [row for row in self._unready if table.last_step[row] <= processed]
        if known:
            self._unready = [row for row in self._unready if row not in known]
            self._masked_rows = np.concatenate((self._masked_rows, np.array(known, dtype=np.int64)))
            self._current = None
        if len(self._masked_rows) and not self._with_masked and self._masked_step <= processed:
            self._with_masked = True
            self._current = None

    def growth_estimate(self, ratio: float) -> int:
        """Return the pages that all rows may yet ask for, if each makes ``ratio`` of its rest."""
        rows, table = self.rows, self._table
        rest = np.maximum(table.end[rows] - table.launched[rows], 0) * ratio
        tokens = table.launched[rows] + rest.astype(np.int64)
        pages = (tokens + self._page_size - 1) // self._page_size
        return int(np.maximum(pages - table.num_pages[rows], 0).sum())
