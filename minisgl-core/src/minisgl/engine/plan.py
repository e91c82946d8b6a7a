"""What one step does, as plain data: rank 0 decides, every rank applies the same plan.

A plan is a numbered delta: rows that got a new owner, page-table entries that changed, and the
launches. It holds numpy arrays only, so that it can be encoded and compared byte by byte.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

ROW_PARAMS = np.dtype(
    [
        ("row", np.int32),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.int64),
    ]
)
"""Sampling parameters of a row with a new owner; temperature 0 is greedy, top_k 0 is all."""

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One forward pass: ``R`` rows, decode rows first.

    Attributes:
        rows: int32 ``[R]``: rows of the page table.
        num_decode_rows: the first so many rows feed their last sampled token.
        starts: int32 ``[R]``: tokens of each row that are in the pool already.
        query_lens: int32 ``[R]``: tokens that each row feeds.
        token_ids: int32: the prefill rows' tokens, one row after the other.
        sampled: bool ``[R]``: whether a token follows the row's last one: not for inner chunks.
        banned: pairs of a sampled row's place among them and the token ids it must not get yet.
    """

    rows: IntArray
    num_decode_rows: int
    starts: IntArray
    query_lens: IntArray
    token_ids: IntArray
    sampled: npt.NDArray[np.bool_]
    banned: tuple[tuple[int, IntArray], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the launch feeds."""
        return self.num_decode_rows + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """One step.

    Attributes:
        number: counts up from 0; a rank that misses one stops.
        added: ``ROW_PARAMS`` of rows with a new owner since the last plan.
        table_writes: int32 ``[n, 3]``: (row, column, page) to write before the launches.
        launches: one or two forward passes, in order.
    """

    number: int
    added: npt.NDArray[np.void] = field(default_factory=lambda: np.empty(0, dtype=ROW_PARAMS))
    table_writes: IntArray = field(default_factory=lambda: np.empty((0, 3), dtype=np.int32))
    launches: tuple[LaunchPlan, ...] = ()
