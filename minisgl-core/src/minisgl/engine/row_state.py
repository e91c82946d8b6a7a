"""What the device keeps about every row: pages, length, last token, sampling parameters."""

from typing import Final

import numpy as np
import torch

from minisgl.attention.batch import MAX_SHARED_GROUPS, SharedPrefixes, list_groups
from minisgl.engine.plan import IntArray
from minisgl.engine.plan_codec import CHUNK_WORDS, PlanLayout
from minisgl.kernel.ops import OpTable
from minisgl.kernel.rows import HEADER_WORDS, RowTensors

INBOX_WORDS: Final = 1 << 16
"""Longest plan that travels through the inbox. Longer ones, with prompts that find long prefixes in
the cache, come with a buffer of their own."""


class RowState:
    """Per-row tensors, changed only by applying plans; one more row than requests, for padding.

    A plan reaches a GPU through the inbox, a buffer that stays where it is: whatever is recorded in
    a CUDA graph can read it there. On a CPU the words are used where they are.

    Attributes:
        rows: the tensors.
        inbox: int32: the last plan, on a GPU; after a plan that did not fit, an empty one.
        masks: int32 ``[m, words]``: those of the last plan; ``None``: it has none.
        shared: which decode rows share a prefix, where some do.

    Args:
        num_rows: requests at once.
        max_seq_len: most tokens of a row; the table is wide enough for it in whole pages.
        page_size: tokens a page.
        device: where the tensors live.
        ops: the operations that change them.
        inbox: send plans through the inbox; by default, on a GPU.
    """

    def __init__(
        self,
        num_rows: int,
        max_seq_len: int,
        page_size: int,
        device: torch.device,
        ops: OpTable | None = None,
        *,
        inbox: bool | None = None,
    ) -> None:
        count, width = num_rows + 1, -(-max_seq_len // page_size)
        self.device = device
        self.page_size = page_size
        self.ops = ops or OpTable()
        self._sends = device.type != "cpu" if inbox is None else inbox
        self.inbox = torch.zeros(
            INBOX_WORDS if self._sends else 0, dtype=torch.int32, device=device
        )
        self.num_decode_rows = 0
        self.masks: torch.Tensor | None = None
        self._shared = torch.zeros(
            2 * num_rows + 3 * MAX_SHARED_GROUPS, dtype=torch.int32, device=device
        )
        self.shared = SharedPrefixes(
            members=self._shared[:num_rows],
            starts=self._shared[num_rows : 2 * num_rows],
            groups=self._shared[2 * num_rows :].view(MAX_SHARED_GROUPS, 3),
        )
        self.rows = RowTensors(
            page_table=torch.zeros((count, width), dtype=torch.int32, device=device),
            lengths=torch.zeros(count, dtype=torch.int64, device=device),
            last_token=torch.zeros(count, dtype=torch.int64, device=device),
            order=torch.full((num_rows,), num_rows, dtype=torch.int64, device=device),
            temperature=torch.zeros(count, dtype=torch.float32, device=device),
            top_p=torch.ones(count, dtype=torch.float32, device=device),
            min_p=torch.zeros(count, dtype=torch.float32, device=device),
            top_k=torch.zeros(count, dtype=torch.int64, device=device),
            seed=torch.zeros(count, dtype=torch.int64, device=device),
        )

    def receive(self, words: IntArray, layout: PlanLayout) -> "DeviceChunks":
        """Bring a packed plan to the device in one copy; ``apply`` is still to come.

        Returns the plan's chunks, which lie on the device now.
        """
        staged = torch.from_numpy(words)
        self.masks = None
        if layout.has_masks:
            # By themselves: they may be large, and only what draws again reads them.
            num_masks = layout.mask_rows.stop - layout.mask_rows.start
            masks = staged[layout.masks].view(num_masks, -1)
            self.masks = masks.to(self.device, non_blocking=True)
        if layout.has_groups:
            self._share(words[layout.shared_groups], words[layout.shared_tokens])
        staged = staged[: layout.token_ids.stop]
        if self._sends:
            staged = self._send(staged)
        self._staged = staged
        if layout.has_order:
            self.num_decode_rows = layout.decode_rows.stop - layout.decode_rows.start
        chunks = staged[layout.chunks].view(-1, CHUNK_WORDS)
        return DeviceChunks(chunks, staged[layout.token_ids])

    def _share(self, group_of: IntArray, tokens: IntArray) -> None:
        """Tell the device which decode rows share what, behind whatever still reads the last."""
        members, groups, starts = list_groups(group_of, tokens, len(self.rows.order))
        words = torch.from_numpy(np.concatenate((members, starts, groups.reshape(-1))))
        if self._shared.is_cuda:
            words = words.pin_memory()  # kept until it is copied
        self._shared.copy_(words, non_blocking=True)

    def words(self, section: slice) -> torch.Tensor:
        """Return a section of the received plan, int32, on the device."""
        return self._staged[section]

    def apply(self) -> None:
        """Write the received plan's rows, pages and order."""
        self.ops.apply_plan(self._staged, self.rows)

    def reset(self) -> None:
        """Forget the rows of all plans so far: none decodes, and a graph finds an empty plan."""
        self.inbox[:HEADER_WORDS].zero_()
        self.rows.order.fill_(len(self.rows.order))
        self.rows.lengths.zero_()
        self.num_decode_rows, self.masks = 0, None

    @property
    def decode_rows(self) -> torch.Tensor:
        """The decode rows in their order, int64 ``[R]``."""
        return self.rows.order[: self.num_decode_rows]

    @property
    def in_inbox(self) -> bool:
        """Whether the received plan lies in the inbox."""
        return self._staged.data_ptr() == self.inbox.data_ptr()

    def slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return where K and V of tokens go: int64 of the shape of ``rows`` and ``positions``."""
        pages = self.rows.page_table[rows, positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size

    def _send(self, words: torch.Tensor) -> torch.Tensor:
        if len(words) <= INBOX_WORDS:
            return self.inbox[: len(words)].copy_(words, non_blocking=True)
        self.inbox[:HEADER_WORDS].zero_()
        return words.to(self.device, non_blocking=True)


class DeviceChunks:
    """The prompt chunks of a step, on the device.

    Attributes:
        rows, starts, lengths: int64 ``[C]``.
        token_ids: int32 ``[tokens]``, one chunk after the other.

    Args:
        words: int32 ``[C, CHUNK_WORDS]``.
        token_ids: int32 ``[tokens]``.
    """

    __slots__ = ("lengths", "rows", "starts", "token_ids")

    def __init__(self, words: torch.Tensor, token_ids: torch.Tensor) -> None:
        # Each of them contiguous: kernels read them from end to end.
        columns = words.t().to(torch.int64, memory_format=torch.contiguous_format)
        self.rows, self.starts, self.lengths = columns[0], columns[1], columns[2]
        self.token_ids = token_ids
