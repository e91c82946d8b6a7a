"""From chosen rows and chunks to launch plans."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from minisgl.engine.plan import LaunchPlan
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.prefill import Chunk
from minisgl.scheduler.table import TableManager


class LaunchBuilder:
    """Builds a step's launches and advances the rows' launched lengths.

    Args:
        table: the rows.
        cache: gives chunks their pages; decode rows have theirs already.
        eos_token_ids: banned while a request has fewer than its ``min_tokens``.
        mixed: one launch for decode rows and chunks, instead of two.
    """

    def __init__(
        self,
        table: TableManager,
        cache: CacheManager,
        eos_token_ids: Sequence[int],
        *,
        mixed: bool,
    ) -> None:
        self._table = table
        self._cache = cache
        self._eos = frozenset(eos_token_ids)
        self._mixed = mixed

    def build(self, rows: npt.NDArray[np.int32], chunks: Sequence[Chunk]) -> tuple[LaunchPlan, ...]:
        """Return the launches: decode rows first; one that would be empty is left out."""
        if self._mixed or not len(rows) or not chunks:
            return (self._launch(rows, chunks),)
        return (self._launch(rows, ()), self._launch(rows[:0], chunks))

    def _launch(self, rows: npt.NDArray[np.int32], chunks: Sequence[Chunk]) -> LaunchPlan:
        table, num_decode = self._table, len(rows)
        starts = table.launched[rows]
        query_lens = np.ones(num_decode, dtype=np.int64)
        sampled = np.ones(num_decode, dtype=np.bool_)
        token_ids = np.empty(0, dtype=np.int32)
        if chunks:
            for chunk in chunks:
                self._cache.extend(chunk.request.row, chunk.start + chunk.length)
            chunk_rows = np.array([chunk.request.row for chunk in chunks], dtype=np.int32)
            rows = np.concatenate((rows, chunk_rows))
            starts = np.concatenate((starts, [chunk.start for chunk in chunks]))
            query_lens = np.concatenate((query_lens, [chunk.length for chunk in chunks]))
            sampled = np.concatenate((sampled, [chunk.is_last for chunk in chunks]))
            token_ids = np.concatenate(
                [
                    table.tokens[chunk.request.row, chunk.start : chunk.start + chunk.length]
                    for chunk in chunks
                ]
            )
        table.launched[rows] = ends = starts + query_lens
        table.in_flight[rows] += 1
        return LaunchPlan(
            rows=rows,
            num_decode_rows=num_decode,
            starts=starts.astype(np.int32),
            query_lens=query_lens.astype(np.int32),
            token_ids=token_ids,
            sampled=sampled,
            banned=self._banned(rows[sampled], ends[sampled]),
        )

    def _banned(
        self, rows: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]
    ) -> tuple[tuple[int, npt.NDArray[np.int32]], ...]:
        """Tokens that rows below their ``min_tokens`` must not get, by place among the sampled."""
        banned = []
        for place in (positions < self._table.min_end[rows]).nonzero()[0].tolist():
            request = self._table.owner(int(rows[place]))
            ids = request.stop_token_ids
            if not request.params.ignore_eos:
                ids = ids | self._eos
            if ids:
                banned.append((place, np.array(sorted(ids), dtype=np.int32)))
        return tuple(banned)
