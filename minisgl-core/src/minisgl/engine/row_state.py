"""What the device keeps about every row: pages, length, last token, sampling parameters."""

import torch

from minisgl.engine.plan import IntArray
from minisgl.engine.plan_codec import CHUNK_WORDS, PARAM_WORDS, PlanLayout


class RowState:
    """Per-row tensors, changed only by applying plans; one more row than requests, for padding.

    Attributes:
        page_table: int32 ``[rows, width]``.
        lengths: int64 ``[rows]``: tokens in the pool; every launch advances those of its rows.
        last_token: int64 ``[rows]``: the token that the next decode launch feeds.
        decode_rows: int64 ``[R]``: the decode rows in their order.
        temperature, top_p, min_p: float32 ``[rows]``.
        top_k, seed: int64 ``[rows]``.

    Args:
        num_rows: requests at once.
        max_seq_len: most tokens of a row; the table is wide enough for it in whole pages.
        page_size: tokens a page.
        device: where the tensors live.
    """

    def __init__(
        self, num_rows: int, max_seq_len: int, page_size: int, device: torch.device
    ) -> None:
        rows, width = num_rows + 1, -(-max_seq_len // page_size)
        self.device = device
        self.page_size = page_size
        self.page_table = torch.zeros((rows, width), dtype=torch.int32, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.decode_rows = torch.empty(0, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)

    def apply(self, words: IntArray, layout: PlanLayout) -> "DeviceChunks":
        """Bring a packed plan to the device in one copy and write its rows, pages and order.

        Returns the plan's chunks, which lie on the device now.
        """
        staged = torch.from_numpy(words).to(self.device, non_blocking=True)
        if layout.table_writes.stop > layout.table_writes.start:
            rows, columns, pages = staged[layout.table_writes].view(-1, 3).unbind(1)
            self.page_table[rows.long(), columns.long()] = pages
        if layout.added.stop > layout.added.start:
            self._add(staged[layout.added].view(-1, PARAM_WORDS))
        if layout.has_order:
            self.decode_rows = staged[layout.decode_rows].long()
        chunks = staged[layout.chunks].view(-1, CHUNK_WORDS).long()
        return DeviceChunks(chunks[:, 0], chunks[:, 1], chunks[:, 2], staged[layout.token_ids])

    def slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return where K and V of tokens go: int64 of the shape of ``rows`` and ``positions``."""
        pages = self.page_table[rows, positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size

    def _add(self, added: torch.Tensor) -> None:
        """Set the parameters of rows with a new owner, words in the order of ``ROW_PARAMS``."""
        rows = added[:, 0].long()
        self.temperature[rows] = added[:, 2].view(torch.float32)
        self.top_k[rows] = added[:, 3].long()
        self.top_p[rows] = added[:, 4].view(torch.float32)
        self.min_p[rows] = added[:, 5].view(torch.float32)
        low, high = added[:, 6].long() & 0xFFFFFFFF, added[:, 7].long()
        self.seed[rows] = high << 32 | low


class DeviceChunks:
    """The prompt chunks of a step, on the device.

    Attributes:
        rows, starts, lengths: int64 ``[C]``.
        token_ids: int32 ``[tokens]``, one chunk after the other.
    """

    __slots__ = ("lengths", "rows", "starts", "token_ids")

    def __init__(
        self,
        rows: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        token_ids: torch.Tensor,
    ) -> None:
        self.rows = rows
        self.starts = starts
        self.lengths = lengths
        self.token_ids = token_ids
