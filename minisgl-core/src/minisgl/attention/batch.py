"""One launch's input, as the model and the attention backend see it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


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
    plan: Any = field(default=None)

    @property
    def num_rows(self) -> int:
        """``R``, decode and prefill rows together."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """``T``."""
        return int(self.input_ids.shape[0])
