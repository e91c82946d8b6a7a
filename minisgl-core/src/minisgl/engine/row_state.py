"""What the device keeps about every row: pages, last token, sampling parameters."""

import numpy as np
import numpy.typing as npt
import torch

from minisgl.engine.plan import BatchPlan


class RowState:
    """Per-row tensors, changed only by applying plans; one more row than requests, for padding.

    Attributes:
        page_table: int32 ``[rows, width]``, on the device.
        host_page_table: the same on the host (on a CPU it is the same memory).
        last_token: int64 ``[rows]``: the token that the next decode launch feeds.
        temperature, top_p, min_p: float32 ``[rows]``.
        top_k, seed: int64 ``[rows]``.
        host_temperature: float32 ``[rows]``, on the host: whether a launch is all greedy.
        host_filtered: bool ``[rows]``, on the host: whether a row uses top-k, top-p or min-p.

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
        self.page_table = torch.zeros((rows, width), dtype=torch.int32, device=device)
        self.host_page_table: npt.NDArray[np.int32] = (
            self.page_table.numpy()
            if device.type == "cpu"
            else np.zeros((rows, width), dtype=np.int32)
        )
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.host_temperature = np.zeros(rows, dtype=np.float32)
        self.host_filtered = np.zeros(rows, dtype=np.bool_)

    def apply(self, plan: BatchPlan) -> None:
        """Write a plan's new rows and page-table entries."""
        if len(plan.table_writes):
            rows, columns, pages = plan.table_writes.T
            self.host_page_table[rows, columns] = pages
            if self.device.type != "cpu":
                index = torch.from_numpy(plan.table_writes.astype(np.int64)).to(self.device)
                self.page_table[index[:, 0], index[:, 1]] = index[:, 2].int()
        if len(plan.added):
            self._add(plan.added)

    def _add(self, added: npt.NDArray[np.void]) -> None:
        rows = torch.from_numpy(added["row"].astype(np.int64)).to(self.device)
        for name in ("temperature", "top_p", "min_p", "top_k", "seed"):
            target: torch.Tensor = getattr(self, name)
            values = torch.from_numpy(added[name].copy()).to(self.device, target.dtype)
            target.index_copy_(0, rows, values)
        self.host_temperature[added["row"]] = added["temperature"]
        self.host_filtered[added["row"]] = (
            (added["top_k"] > 0) | (added["top_p"] < 1) | (added["min_p"] > 0)
        )
