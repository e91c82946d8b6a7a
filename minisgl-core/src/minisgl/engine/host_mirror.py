"""The host's own copy of what planners of attention kernels want to know about every row.

Advanced by the same plans as the device's row state, so that nothing is ever read back.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minisgl.engine.plan import BatchPlan

RowArray = npt.NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class Launch:
    """One forward pass: ``R`` rows, decode rows first.

    Attributes:
        rows: int64 ``[R]``.
        num_decode_rows: the first so many rows feed their last sampled token.
        query_lens: int64 ``[R]``: tokens that each row feeds.
        ends: int64 ``[R]``: tokens that each row has in the pool afterwards.
        num_sampled: a token follows the first so many rows.
        num_prefill_tokens: tokens of the prefill rows.
    """

    rows: RowArray
    num_decode_rows: int
    query_lens: RowArray
    ends: RowArray
    num_sampled: int
    num_prefill_tokens: int

    @property
    def sampled_rows(self) -> RowArray:
        """Rows that get a token, int64 ``[S]``."""
        return self.rows[: self.num_sampled]

    @property
    def sampled_ends(self) -> RowArray:
        """Lengths of the rows that get a token, int64 ``[S]``."""
        return self.ends[: self.num_sampled]


class HostMirror:
    """Lengths, order and sampling kinds of all rows, as arrays; one more row, for padding.

    Attributes:
        decode_rows: int64 ``[R]``: the decode rows in their order.
        temperature: float32 ``[rows]``.
        filtered: bool ``[rows]``: top-k, top-p or min-p matters.
        mask_places: int64 ``[rows]``: which mask of the last plan is the row's; -1: it has none.
        has_masks: any row has one.
        shares: some decode rows share a prefix, as the last plan that was about it says.

    Args:
        num_rows: requests at once.
    """

    def __init__(self, num_rows: int) -> None:
        rows = num_rows + 1
        self._lengths = np.zeros(rows, dtype=np.int64)
        self._decode_lengths = np.zeros(0, dtype=np.int64)
        self.decode_rows: RowArray = np.empty(0, dtype=np.int64)
        self.temperature = np.zeros(rows, dtype=np.float32)
        self.filtered = np.zeros(rows, dtype=np.bool_)
        self._ones = np.ones(rows, dtype=np.int64)
        self.mask_places = np.full(rows, -1, dtype=np.int64)
        self.has_masks = False
        self.shares = False

    def apply(self, plan: BatchPlan) -> tuple[Launch, ...]:
        """Take over a plan's changes; returns its launches, with all lengths advanced."""
        if len(plan.added):
            self._add(plan)
        if self.has_masks or len(plan.mask_rows):
            self.mask_places.fill(-1)
            self.mask_places[plan.mask_rows] = np.arange(len(plan.mask_rows))
            self.has_masks = len(plan.mask_rows) > 0
        if plan.decode_rows is not None:
            self._lengths[self.decode_rows] = self._decode_lengths
            self.decode_rows = plan.decode_rows.astype(np.int64)
            self._decode_lengths = self._lengths[self.decode_rows]
            self.shares = False
        if len(plan.shared_groups):
            self.shares = True
        decode = self._decode_launch() if plan.num_decode_rows else None
        if not len(plan.chunks):
            return (decode,) if decode else ()
        prefill = self._prefill_launch(plan)
        if decode is None:
            return (prefill,)
        return (_join(decode, prefill),) if plan.mixed else (decode, prefill)

    def _add(self, plan: BatchPlan) -> None:
        added = plan.added
        rows = added["row"]
        self.temperature[rows] = added["temperature"]
        self.filtered[rows] = (
            (added["top_k"] > 0) | (added["top_p"] < 1) | (added["min_p"] > 0)
        ) & (added["temperature"] > 0)

    def _decode_launch(self) -> Launch:
        rows = self.decode_rows
        self._decode_lengths = ends = self._decode_lengths + 1
        return Launch(
            rows=rows,
            num_decode_rows=len(rows),
            query_lens=self._ones[: len(rows)],
            ends=ends,
            num_sampled=len(rows),
            num_prefill_tokens=0,
        )

    def _prefill_launch(self, plan: BatchPlan) -> Launch:
        chunks = plan.chunks
        rows = chunks["row"].astype(np.int64)
        query_lens = chunks["length"].astype(np.int64)
        ends = chunks["start"] + query_lens
        self._lengths[rows] = ends
        num_sampled = int(np.count_nonzero(chunks["sampled"]))
        assert chunks["sampled"][:num_sampled].all(), "sampled chunks come first"
        return Launch(
            rows=rows,
            num_decode_rows=0,
            query_lens=query_lens,
            ends=ends,
            num_sampled=num_sampled,
            num_prefill_tokens=len(plan.token_ids),
        )


def _join(decode: Launch, prefill: Launch) -> Launch:
    return Launch(
        rows=np.concatenate((decode.rows, prefill.rows)),
        num_decode_rows=decode.num_decode_rows,
        query_lens=np.concatenate((decode.query_lens, prefill.query_lens)),
        ends=np.concatenate((decode.ends, prefill.ends)),
        num_sampled=decode.num_sampled + prefill.num_sampled,
        num_prefill_tokens=prefill.num_prefill_tokens,
    )
