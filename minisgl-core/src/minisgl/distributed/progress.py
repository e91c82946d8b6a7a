"""What every rank shows the others about itself, in memory that they share."""

import mmap
import tempfile
from typing import IO, Final, NamedTuple

_ROW_WORDS: Final = 16
_BEATS, _COLLECTIVES, _BEGUN, _FINISHED, _DIGESTS = range(5)

DIGEST_DEPTH: Final = 4
"""Digests of so many plans are kept: a rank is never further ahead of another."""


class Digests(NamedTuple):
    """Running checksums of all that a rank has done up to one plan: equal on every rank.

    Attributes:
        plans: of the packed plans.
        tokens: of the sampled tokens.
    """

    plans: int
    tokens: int


class RankProgress:
    """One rank's row of the board. Written by that rank only; words are written as a whole.

    Args:
        words: int64 ``[16]``, shared.
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words

    @property
    def beats(self) -> int:
        """Signs of life so far."""
        return int(self._words[_BEATS])

    @property
    def num_collectives(self) -> int:
        """Collectives begun so far."""
        return int(self._words[_COLLECTIVES])

    @property
    def begun(self) -> int:
        """Number of the last plan begun; -1 before the first."""
        return int(self._words[_BEGUN])

    @property
    def finished(self) -> int:
        """Number of the last plan whose tokens are known; -1 before the first."""
        return int(self._words[_FINISHED])

    def beat(self) -> None:
        """Give a sign of life."""
        self._words[_BEATS] += 1

    def count_collective(self) -> None:
        """Note that a collective begins."""
        self._words[_COLLECTIVES] += 1

    def begin(self, number: int) -> None:
        """Note that plan ``number`` begins."""
        self._words[_BEGUN] = number

    def finish(self, number: int, digests: Digests) -> None:
        """Note that plan ``number`` is done; its digests stay for ``DIGEST_DEPTH`` plans."""
        at = _DIGESTS + 2 * (number % DIGEST_DEPTH)
        self._words[at], self._words[at + 1] = digests
        self._words[_FINISHED] = number

    def digests(self, number: int) -> Digests:
        """Return the digests of one of the last plans finished."""
        at = _DIGESTS + 2 * (number % DIGEST_DEPTH)
        return Digests(int(self._words[at]), int(self._words[at + 1]))


class ProgressBoard:
    """All ranks' rows in one small shared file, which has no name and so cannot be left over.

    Args:
        file: holds ``num_bytes(size)`` bytes; an open file, or the descriptor that a rank got.
        size: number of ranks.
    """

    def __init__(self, file: IO[bytes] | int, size: int) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        words = memoryview(mmap.mmap(descriptor, num_bytes(size))).cast("q")
        self.ranks = [
            RankProgress(words[rank * _ROW_WORDS : (rank + 1) * _ROW_WORDS]) for rank in range(size)
        ]

    @staticmethod
    def new_file(size: int) -> IO[bytes]:
        """Return a file for a new board on which no plan has begun."""
        file = tempfile.TemporaryFile()  # noqa: SIM115  (the caller closes it)
        file.truncate(num_bytes(size))
        for progress in ProgressBoard(file, size).ranks:
            progress.begin(-1)
            progress.finish(-1, Digests(0, 0))
        return file


def num_bytes(size: int) -> int:
    """Return the length of the board of ``size`` ranks."""
    return size * _ROW_WORDS * 8
