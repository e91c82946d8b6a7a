"""Block tables: the pages of a launch's rows side by side, for kernels that take them so.

The page table has a row for every request, in no order; a launch's rows are gathered from it by one
kernel. In a CUDA graph that is the graph's first: it reads the launch's rows where they lie then.
"""

import torch

from minisgl.attention.batch import Batch
from minisgl.attention.interface import AttentionContext


class BlockTables:
    """Gathers block tables; on the caller's current stream, without waiting for it.

    Graphs of all sizes share one table of a width: they run one after the other, and each writes it
    anew.

    Args:
        context: of the engine.
    """

    def __init__(self, context: AttentionContext) -> None:
        self._page_size = context.page_size
        self._device = context.device
        self._most_rows = context.max_running_requests
        self._recorded: dict[int, torch.Tensor] = {}

    def of(self, batch: Batch) -> torch.Tensor:
        """Return the table of a launch, int32 ``[R, columns]``, as wide as its longest row needs.

        What stands behind a row's last page may be anything.
        """
        columns = -(-int(batch.kv_lens.max()) // self._page_size)
        return batch.page_table[:, :columns].index_select(0, batch.rows)

    def for_graph(self, batch: Batch) -> torch.Tensor:
        """Return the table of a launch to be recorded, int32 ``[R, width]``, still zeros."""
        rows, width = batch.num_rows, batch.page_table.shape[1]
        table = self._recorded.get(width)
        if table is None or table.shape[0] < rows:
            shape = (max(rows, self._most_rows), width)
            table = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._recorded[width] = table
        return table[:rows]

    def gather(self, batch: Batch, table: torch.Tensor) -> None:
        """Write the pages of ``batch``'s rows into a table of ``for_graph``; recorded."""
        torch.index_select(batch.page_table, 0, batch.rows, out=table)
