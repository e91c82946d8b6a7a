"""What one step does, as plain data: rank 0 decides, every rank applies the same plan.

A plan is a numbered delta: rows with a new owner, page-table entries that changed, the order of
the decode rows if it changed, and the prompt chunks. What every rank can advance by itself is not
in it: a decode launch feeds each row's last sampled token at the row's length, which then grows
by one. So a plan for 1024 decode rows that nothing happened to is a few words long.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

ROW_PARAMS = np.dtype(
    [
        ("row", np.int32),
        ("spare", np.int32),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.int64),
    ]
)
"""A row with a new owner. ``temperature`` 0 is greedy, ``top_k`` 0 is all; ``spare`` keeps
the seed on 8 bytes."""

CHUNK = np.dtype(
    [("row", np.int32), ("start", np.int32), ("length", np.int32), ("sampled", np.int32)]
)
"""``length`` prompt tokens of ``row`` from position ``start`` on; ``sampled`` is 1 if a token
follows the last of them, 0 for an inner chunk."""

IntArray = npt.NDArray[np.int32]
ParamsArray = npt.NDArray[np.void]

NO_PARAMS: ParamsArray = np.empty(0, dtype=ROW_PARAMS)
NO_CHUNKS: ParamsArray = np.empty(0, dtype=CHUNK)
NO_CONTROLS: IntArray = np.empty(0, dtype=np.int32)
NO_WRITES: IntArray = np.empty((0, 3), dtype=np.int32)
NO_TOKENS: IntArray = np.empty(0, dtype=np.int32)
NO_MASKS: IntArray = np.empty((0, 0), dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """One step: at most one decode launch and one prefill launch, or both in one.

    Attributes:
        number: counts up from 0; a rank that misses one stops.
        added: ``ROW_PARAMS`` of rows with a new owner since the last plan.
        controls: int32: records of those added rows that ask for more than sampling: see
            ``minisgl.engine.controls``.
        table_writes: int32 ``[n, 3]``: (row, column, page) to write before the launches, each
            entry at most once.
        decode_rows: int32 ``[R]``: the decode rows in their order, if that changed since the last
            plan; else ``None``.
        shared_groups: int32 ``[R]``: with which group each decode row shares a cached prefix, -1:
            with none; empty: as in the last plan, or, with new ``decode_rows``, no row shares.
        shared_tokens: int32 ``[G]``: tokens of each group's prefix, in whole pages.
        num_decode_rows: all decode rows feed their last sampled token, or (0) none does.
        chunks: ``CHUNK``: prompt chunks of this step, each row at most once; those after which a
            token follows come first.
        token_ids: int32: the chunks' tokens, one chunk after the other.
        mixed: decode rows and chunks share one launch; otherwise decode rows come first.
        mask_rows: int32 ``[m]``: rows whose token of this step must be among some, each of them
            sampled by one of the launches.
        masks: int32 ``[m, words]``: those tokens, a bit each, from the lowest of the first word.
    """

    number: int
    added: ParamsArray = field(default_factory=lambda: NO_PARAMS)
    controls: IntArray = field(default_factory=lambda: NO_CONTROLS)
    table_writes: IntArray = field(default_factory=lambda: NO_WRITES)
    decode_rows: IntArray | None = None
    shared_groups: IntArray = field(default_factory=lambda: NO_TOKENS)
    shared_tokens: IntArray = field(default_factory=lambda: NO_TOKENS)
    num_decode_rows: int = 0
    chunks: ParamsArray = field(default_factory=lambda: NO_CHUNKS)
    token_ids: IntArray = field(default_factory=lambda: NO_TOKENS)
    mixed: bool = False
    mask_rows: IntArray = field(default_factory=lambda: NO_TOKENS)
    masks: IntArray = field(default_factory=lambda: NO_MASKS)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step feeds."""
        return self.num_decode_rows + len(self.token_ids)
