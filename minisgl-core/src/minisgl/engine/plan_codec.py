"""A plan packed into 32-bit words: what is copied to a device and sent to other ranks.

Layout: a header of ``HEADER_WORDS`` words (number low and high, flags, and the length of each
section), then the sections one after the other: added rows, controls, table writes, decode rows,
chunks, token ids; then, where the flags say so, groups of rows that share a prefix (number of rows,
of groups, the rows' groups, the groups' tokens), and masks (their number, the words of each, their
rows, the masks). One copy brings all before these two to a device, where every section is a slice.
"""

from struct import Struct
from typing import Final, NamedTuple

import numpy as np

from minisgl.engine.plan import CHUNK, NO_MASKS, ROW_PARAMS, BatchPlan, IntArray

HEADER_WORDS: Final = 10
PARAM_WORDS: Final = ROW_PARAMS.itemsize // 4
CHUNK_WORDS: Final = CHUNK.itemsize // 4

_HEADER: Final = Struct(f"={HEADER_WORDS}i")
_HAS_ORDER: Final = 1
_MIXED: Final = 2
_HAS_MASKS: Final = 4
_HAS_GROUPS: Final = 8


class PlanLayout(NamedTuple):
    """The header of a packed plan, and where its sections lie, in words."""

    number: int
    has_order: bool
    mixed: bool
    num_decode_rows: int
    added: slice
    controls: slice
    table_writes: slice
    decode_rows: slice
    chunks: slice
    token_ids: slice
    shared_groups: slice
    shared_tokens: slice
    mask_rows: slice
    masks: slice

    @property
    def has_groups(self) -> bool:
        """Whether it says which rows share a prefix."""
        return bool(self.shared_groups.stop > self.shared_groups.start)

    @property
    def has_masks(self) -> bool:
        """Whether any row has one."""
        return bool(self.masks.stop > self.masks.start)

    @classmethod
    def of(cls, words: IntArray) -> "PlanLayout":
        """Read the header of a packed plan."""
        low, high, flags, added, controls, writes, order, chunks, tokens, num_decode = (
            _HEADER.unpack_from(words.data)
        )
        a = HEADER_WORDS + added * PARAM_WORDS
        b = a + controls
        c = b + writes * 3
        d = c + order
        e = d + chunks * CHUNK_WORDS
        end = e + tokens
        groups = shared_tokens = slice(end, end)
        if flags & _HAS_GROUPS:
            num_rows, num_groups = words[end : end + 2].tolist()
            groups = slice(end + 2, end + 2 + num_rows)
            shared_tokens = slice(groups.stop, groups.stop + num_groups)
            end = shared_tokens.stop
        mask_rows = masks = slice(end, end)
        if flags & _HAS_MASKS:
            num_masks, width = words[end : end + 2].tolist()
            mask_rows = slice(end + 2, end + 2 + num_masks)
            masks = slice(mask_rows.stop, mask_rows.stop + num_masks * width)
        return cls(
            high << 31 | low,
            bool(flags & _HAS_ORDER),
            bool(flags & _MIXED),
            num_decode,
            slice(HEADER_WORDS, a),
            slice(a, b),
            slice(b, c),
            slice(c, d),
            slice(d, e),
            slice(e, e + tokens),
            groups,
            shared_tokens,
            mask_rows,
            masks,
        )


def plan_words(plan: BatchPlan) -> int:
    """Return the number of words that ``encode_plan`` will use."""
    return (
        HEADER_WORDS
        + len(plan.added) * PARAM_WORDS
        + len(plan.controls)
        + plan.table_writes.size
        + (0 if plan.decode_rows is None else len(plan.decode_rows))
        + len(plan.chunks) * CHUNK_WORDS
        + len(plan.token_ids)
        + (2 + len(plan.shared_groups) + len(plan.shared_tokens) if len(plan.shared_groups) else 0)
        + (2 + len(plan.mask_rows) + plan.masks.size if len(plan.mask_rows) else 0)
    )


def encode_plan(plan: BatchPlan, words: IntArray) -> int:
    """Pack ``plan`` into the front of ``words``, int32 ``[>= plan_words(plan)]``.

    Returns the number of words used.
    """
    order = plan.decode_rows
    num_order = 0 if order is None else len(order)
    _HEADER.pack_into(
        words.data,
        0,
        plan.number & 0x7FFFFFFF,
        plan.number >> 31,
        (0 if order is None else _HAS_ORDER)
        | (_MIXED if plan.mixed else 0)
        | (_HAS_MASKS if len(plan.mask_rows) else 0)
        | (_HAS_GROUPS if len(plan.shared_groups) else 0),
        len(plan.added),
        len(plan.controls),
        len(plan.table_writes),
        num_order,
        len(plan.chunks),
        len(plan.token_ids),
        plan.num_decode_rows,
    )
    used = HEADER_WORDS
    for section in (
        plan.added, plan.controls, plan.table_writes, order, plan.chunks, plan.token_ids
    ):  # fmt: skip
        if section is not None and len(section):
            flat = section.view(np.int32).reshape(-1)
            words[used : used + len(flat)] = flat
            used += len(flat)
    if len(plan.shared_groups):
        used = _encode_groups(plan, words, used)
    return _encode_masks(plan, words, used) if len(plan.mask_rows) else used


def decode_plan(words: IntArray, layout: PlanLayout | None = None) -> BatchPlan:
    """Return the plan in ``words``; its arrays are views of them.

    Args:
        words: int32, packed by ``encode_plan``.
        layout: of ``words``, if it has been read already.
    """
    at = layout or PlanLayout.of(words)
    return BatchPlan(
        number=at.number,
        added=words[at.added].view(ROW_PARAMS),
        controls=words[at.controls],
        table_writes=words[at.table_writes].reshape(-1, 3),
        decode_rows=words[at.decode_rows] if at.has_order else None,
        num_decode_rows=at.num_decode_rows,
        chunks=words[at.chunks].view(CHUNK),
        token_ids=words[at.token_ids],
        mixed=at.mixed,
        shared_groups=words[at.shared_groups],
        shared_tokens=words[at.shared_tokens],
        mask_rows=words[at.mask_rows],
        masks=_masks(words, at),
    )


def _encode_groups(plan: BatchPlan, words: IntArray, used: int) -> int:
    num_rows, num_groups = len(plan.shared_groups), len(plan.shared_tokens)
    words[used : used + 2] = num_rows, num_groups
    used += 2
    words[used : used + num_rows] = plan.shared_groups
    used += num_rows
    words[used : used + num_groups] = plan.shared_tokens
    return used + num_groups


def _encode_masks(plan: BatchPlan, words: IntArray, used: int) -> int:
    num_masks, width = len(plan.mask_rows), int(plan.masks.shape[1])
    words[used : used + 2] = num_masks, width
    used += 2
    words[used : used + num_masks] = plan.mask_rows
    used += num_masks
    words[used : used + num_masks * width] = plan.masks.reshape(-1)
    return used + num_masks * width


def _masks(words: IntArray, at: PlanLayout) -> IntArray:
    if not at.has_masks:
        return NO_MASKS
    return words[at.masks].reshape(at.mask_rows.stop - at.mask_rows.start, -1)
