"""A plan packed into 32-bit words: what is copied to a device and sent to other ranks.

Layout: a header of ``HEADER_WORDS`` words (number low and high, flags, and the length of each
section), then the sections one after the other: added rows, bans, table writes, decode rows,
chunks, token ids. One copy brings all of it to a device, where every section is a slice.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from minisgl.engine.plan import (
    CHUNK,
    NO_BANS,
    NO_CHUNKS,
    NO_PARAMS,
    NO_TOKENS,
    NO_WRITES,
    ROW_PARAMS,
    BatchPlan,
    IntArray,
)

HEADER_WORDS: Final = 10
PARAM_WORDS: Final = ROW_PARAMS.itemsize // 4
CHUNK_WORDS: Final = CHUNK.itemsize // 4

_HAS_ORDER: Final = 1
_MIXED: Final = 2


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """Where the sections of a packed plan lie, in words."""

    added: slice
    bans: slice
    table_writes: slice
    decode_rows: slice
    chunks: slice
    token_ids: slice

    @classmethod
    def of(cls, words: IntArray) -> "PlanLayout":
        """Read the header of a packed plan."""
        _, _, _, added, bans, writes, order, chunks, tokens, _ = words[:HEADER_WORDS].tolist()
        a = HEADER_WORDS + added * PARAM_WORDS
        b = a + bans * 2
        c = b + writes * 3
        d = c + order
        e = d + chunks * CHUNK_WORDS
        return cls(
            slice(HEADER_WORDS, a), slice(a, b), slice(b, c), slice(c, d), slice(d, e),
            slice(e, e + tokens),
        )  # fmt: skip


def plan_words(plan: BatchPlan) -> int:
    """Return the number of words that ``encode_plan`` will use."""
    return (
        HEADER_WORDS
        + len(plan.added) * PARAM_WORDS
        + plan.bans.size
        + plan.table_writes.size
        + (0 if plan.decode_rows is None else len(plan.decode_rows))
        + len(plan.chunks) * CHUNK_WORDS
        + len(plan.token_ids)
    )


def encode_plan(plan: BatchPlan, words: IntArray) -> int:
    """Pack ``plan`` into the front of ``words``, int32 ``[>= plan_words(plan)]``.

    Returns the number of words used.
    """
    order = plan.decode_rows
    num_order = 0 if order is None else len(order)
    words[:HEADER_WORDS] = (
        plan.number & 0x7FFFFFFF,
        plan.number >> 31,
        (0 if order is None else _HAS_ORDER) | (_MIXED if plan.mixed else 0),
        len(plan.added),
        len(plan.bans),
        len(plan.table_writes),
        num_order,
        len(plan.chunks),
        len(plan.token_ids),
        plan.num_decode_rows,
    )
    used = HEADER_WORDS
    for section in (plan.added, plan.bans, plan.table_writes, order, plan.chunks, plan.token_ids):
        if section is not None and len(section):
            flat = section.view(np.int32).reshape(-1)
            words[used : used + len(flat)] = flat
            used += len(flat)
    return used


def plan_number(words: IntArray) -> int:
    """Return the number of the plan in ``words``, from its header alone."""
    return int(words[1]) << 31 | int(words[0])


def decode_plan(words: IntArray) -> BatchPlan:
    """Return the plan in ``words``; its arrays are views of them."""
    low, high, flags, added, bans, writes, _, chunks, tokens, num_decode = words[
        :HEADER_WORDS
    ].tolist()
    at = PlanLayout.of(words)
    return BatchPlan(
        number=high << 31 | low,
        added=words[at.added].view(ROW_PARAMS) if added else NO_PARAMS,
        bans=words[at.bans].reshape(-1, 2) if bans else NO_BANS,
        table_writes=words[at.table_writes].reshape(-1, 3) if writes else NO_WRITES,
        decode_rows=words[at.decode_rows] if flags & _HAS_ORDER else None,
        num_decode_rows=num_decode,
        chunks=words[at.chunks].view(CHUNK) if chunks else NO_CHUNKS,
        token_ids=words[at.token_ids] if tokens else NO_TOKENS,
        mixed=bool(flags & _MIXED),
    )
