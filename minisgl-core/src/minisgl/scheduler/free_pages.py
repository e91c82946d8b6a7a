"""The free list: a stack of page numbers in one array."""

import numpy as np
import numpy.typing as npt

PageArray = npt.NDArray[np.int32]


class FreePages:
    """Pages 1 to ``num_pages``, all free at first; page 0 is the dummy page and never among them.

    Taking and giving back cost a copy of the page numbers, however many there are.

    Args:
        num_pages: pages of the pool, without the dummy page.
    """

    def __init__(self, num_pages: int) -> None:
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int32)
        self._num = num_pages

    def __len__(self) -> int:
        return self._num

    def take(self, num_pages: int) -> PageArray:
        """Return ``num_pages`` pages, int32, that are free no longer; so many must be here."""
        assert num_pages <= self._num, "pages are counted before they are taken"
        self._num -= num_pages
        return self._stack[self._num : self._num + num_pages].copy()

    def give_back(self, pages: PageArray) -> None:
        """Free ``pages``, int32 ``[n]``."""
        end = self._num + len(pages)
        assert end <= len(self._stack), "more pages come back than there are"
        self._stack[self._num : end] = pages
        self._num = end

    def pages(self) -> PageArray:
        """Return all free pages, int32, for checks."""
        return self._stack[: self._num].copy()
