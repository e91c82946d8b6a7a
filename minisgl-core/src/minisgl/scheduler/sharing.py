"""Which decode rows share a cached prefix, and whether it pays to read that once for all of them.

The prefix cache gives requests that begin alike the same pages, so the page table says it all.
Where they share in several steps (a system prompt, then one of many documents), each row is in one
group: those groups are chosen that save most.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from minisgl.attention.batch import MAX_SHARED_GROUPS
from minisgl.engine.plan import IntArray
from minisgl.scheduler.decode import DecodeSet, RowArray
from minisgl.scheduler.table import TableManager

_STEPS_BETWEEN_LOOKS: Final = 8
"""Rows come and go at any step; to compare their pages costs more than to note that."""

_LEAST_SHARE: Final = 8
"""One in so many tokens must be saved: kernels for shared prefixes read the others no faster."""


@dataclass(frozen=True, slots=True)
class SharedGroups:
    """Rows of a decode set that share prefixes.

    Attributes:
        group_of: int32 ``[R]``: the group of each row, -1 for none.
        tokens: int32 ``[G]``: what each group shares, whole pages.
    """

    group_of: IntArray
    tokens: IntArray


class PrefixSharing:
    """Finds groups among the decode rows; a group holds for as long as its rows decode.

    Args:
        table: the rows.
        page_size: tokens a page.
        min_tokens: tokens that all groups together must save a launch from reading; ``None``: the
            engine has no use for groups.
    """

    def __init__(self, table: TableManager, page_size: int, min_tokens: int | None) -> None:
        self._table = table
        self._page_size = page_size
        self._min_tokens = min_tokens
        self._group_of = np.full(len(table.requests), -1, dtype=np.int64)
        self._tokens = np.empty(0, dtype=np.int64)
        self._order: DecodeSet | None = None
        self._groups: SharedGroups | None = None
        self._version = -1
        self._steps_to_look = 0

    def of(self, order: DecodeSet, version: int) -> SharedGroups | None:
        """Return the groups of the rows of a launch; the same object until something changes.

        Args:
            order: the rows.
            version: another number if rows may have been moved onto cached pages.
        """
        if self._min_tokens is None:
            return None
        self._steps_to_look -= 1
        if order is self._order and version == self._version:
            return self._groups
        if self._steps_to_look <= 0:
            self._steps_to_look = _STEPS_BETWEEN_LOOKS
            self._version = version
            self._look(order)
        elif order is self._order:
            return self._groups
        self._order = order
        self._groups = self._among(order)
        return self._groups

    def forget(self, rows: IntArray) -> None:
        """Take rows that have a new owner out of their groups."""
        self._group_of[rows] = -1

    def _look(self, order: DecodeSet) -> None:
        """Compare the rows' pages and group them anew."""
        rows, table = order.rows, self._table
        self._group_of[:] = -1
        found: list[tuple[RowArray, int]] = []
        if len(rows) > 1:
            _, family, sizes = np.unique(
                table.pages[rows, 0], return_inverse=True, return_counts=True
            )
            for number in np.flatnonzero(sizes > 1).tolist():
                found += self._best(rows[family == number], 0)
        found.sort(key=_saved, reverse=True)
        self._tokens = np.zeros(MAX_SHARED_GROUPS, dtype=np.int64)
        for number, (members, columns) in enumerate(found[:MAX_SHARED_GROUPS]):
            self._group_of[members] = number
            self._tokens[number] = columns * self._page_size

    def _best(self, rows: RowArray, first: int) -> list[tuple[RowArray, int]]:
        """Return groups, and the columns that each shares, of rows equal in ``first`` columns.

        Either all of them are one group, or they are grouped by what comes after their common
        columns, whichever saves more.
        """
        table, common = self._table, self._common_columns(rows, first)
        together = [(rows, common)]
        longer = rows[table.num_pages[rows] > common]
        _, branch, sizes = np.unique(
            table.pages[longer, common] if len(longer) else longer,
            return_inverse=True,
            return_counts=True,
        )
        apart: list[tuple[RowArray, int]] = []
        for number in np.flatnonzero(sizes > 1).tolist():
            apart += self._best(longer[branch == number], common)
        return apart if sum(map(_saved, apart)) > sum(map(_saved, together)) else together

    def _common_columns(self, rows: RowArray, first: int) -> int:
        """Return in how many columns the tables of ``rows`` are equal; in ``first`` they are."""
        limit, width = int(self._table.num_pages[rows].min()), 8
        while first < limit:
            pages = self._table.pages[rows, first : min(first + width, limit)]
            differs = (pages != pages[0]).any(axis=0)
            if differs.any():
                return first + int(differs.argmax())
            first, width = first + pages.shape[1], 2 * width
        return first

    def _among(self, order: DecodeSet) -> SharedGroups | None:
        """Return the known groups of these rows, if it pays to read their prefixes once."""
        assert self._min_tokens is not None
        group_of = self._group_of[order.rows]
        counts = np.bincount(group_of[group_of >= 0], minlength=len(self._tokens))
        saved = np.maximum(counts - 1, 0) * self._tokens
        least = max(self._min_tokens, int(order.lengths.sum()) // _LEAST_SHARE)
        if not saved.sum() >= least > 0:
            return None
        alone = (group_of >= 0) & (counts[group_of] < 2)
        group_of[alone] = -1
        return SharedGroups(group_of.astype(np.int32), self._tokens.astype(np.int32))


def _saved(group: tuple[RowArray, int]) -> int:
    """Pages that a group need not read."""
    rows, columns = group
    return (len(rows) - 1) * columns
