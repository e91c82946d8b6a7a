"""One launch's input, as the model and the attention backend see it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int32]

MAX_SHARED_GROUPS = 16
"""Of rows that share a prefix, in one launch: those that gain most."""


@dataclass(slots=True, kw_only=True)
class SharedPrefixes:
    """Which decode rows begin with the same pages, so that these need to be read only once.

    What the rows' page tables say stays true without this: a backend may leave it aside.

    Attributes:
        members: ``[>= R]`` int32, on the device: places of rows; those of a group lie together.
        groups: ``[MAX_SHARED_GROUPS, 3]`` int32, on the device: where a group's members begin, how
            many they are (0: there is no such group), and how many tokens they share, whole pages.
        starts: ``[>= R]`` int32, on the device: tokens of each row before its own ones, fewer than
            it has; 0 if it is in no group.
    """

    members: torch.Tensor
    groups: torch.Tensor
    starts: torch.Tensor


def list_groups(group_of: IntArray, tokens: IntArray, size: int) -> tuple[IntArray, ...]:
    """Return the arrays of ``SharedPrefixes`` on the host, int32.

    Args:
        group_of: int32 ``[R]``: the group of each decode row, -1 for none.
        tokens: int32 ``[G]``: what each group shares; at most ``MAX_SHARED_GROUPS``.
        size: rows that ``members`` and ``starts`` are for, at least ``R``.
    """
    assert len(tokens) <= MAX_SHARED_GROUPS
    members, starts = np.zeros(size, dtype=np.int32), np.zeros(size, dtype=np.int32)
    groups = np.zeros((MAX_SHARED_GROUPS, 3), dtype=np.int32)
    grouped = np.flatnonzero(group_of >= 0)
    order = grouped[np.argsort(group_of[grouped], kind="stable")]
    members[: len(order)] = order
    counts = np.bincount(group_of[grouped], minlength=len(tokens))
    groups[: len(tokens), 0] = np.cumsum(counts) - counts
    groups[: len(tokens), 1] = counts
    groups[: len(tokens), 2] = tokens
    starts[grouped] = tokens[group_of[grouped]]
    return members, groups, starts


@dataclass(slots=True, kw_only=True)
class Batch:
    """The rows and tokens of one launch: decode rows first, then prefill (extend) rows.

    Tokens of one row lie together, in order. ``T`` tokens, ``R`` rows, ``S`` sampled rows.

    Attributes:
        input_ids: ``[T]`` int64, on the device.
        positions: ``[T]`` int64: position of each token in its sequence.
        slots: ``[T]`` int64: where K and V go, ``page * page_size + offset``; -1 stores nothing.
        sample_indices: ``[S]`` int64: tokens whose logits are wanted; ``None`` means all ``T``.
        rows: ``[R]`` int64, on the device, contiguous: rows of the page table.
        num_decode_rows: the first so many rows have exactly one token and are decoding.
        query_lens: ``[R]`` int32, host: tokens of each row in this launch.
        kv_lens: ``[R]`` int32, host: tokens of each row that attention sees, these included.
        kv_lens_device: ``[R]`` int32, on the device: the same as ``kv_lens``.
        page_table: ``[table rows, width]`` int32, on the device: pages of every row.
        page_size: tokens a page.
        shared: of decode rows alone, those that share a prefix; ``None``: none do.
        plan: what the attention backend's ``plan`` made of this batch; opaque to all others.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sample_indices: torch.Tensor | None
    rows: torch.Tensor
    num_decode_rows: int
    query_lens: npt.NDArray[np.int32]
    kv_lens: npt.NDArray[np.int32]
    kv_lens_device: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    shared: SharedPrefixes | None = None
    plan: Any = field(default=None)

    @property
    def num_rows(self) -> int:
        """``R``, decode and prefill rows together."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """``T``."""
        return int(self.input_ids.shape[0])
