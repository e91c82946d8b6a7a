"""The backend ``fa``: launches, eager and in CUDA graphs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from minisgl.attention import AttentionBackend, AttentionContext, AttentionLayerSpec, Batch
from minisgl_attn_fa.buffers import CopyEvent, Ends
from minisgl_attn_fa.kernels import Kernel, Launch


class FaBackend(AttentionBackend):
    """Paged attention through one of the FlashAttentions; made by ``create_backend``.

    Nothing is planned on the host but index pointers: the kernels read lengths and pages on the
    device, pages from a block table that one kernel gathers from the page table. So a decode graph
    gathers its own at its head and is replayed as it is.

    Everything is launched on the caller's current stream, which must be the same for all calls.

    Args:
        context: of the engine.
        kernel: which FlashAttention.
        make_event: ``torch.cuda.Event``, or a stand-in.
    """

    def __init__(
        self, context: AttentionContext, kernel: Kernel, make_event: Callable[[], CopyEvent]
    ) -> None:
        self.cuda_graphs = self
        self._pool = context.kv_pool
        self._page_size = context.page_size
        self._device = context.device
        self._most_rows = context.max_running_requests
        self._kernel = kernel
        self._ends = [Ends(self._most_rows, context.device, make_event) for _ in range(2)]
        self._recorded: torch.Tensor | None = None

    def plan(self, batch: Batch, slot: int) -> Launch:
        """Gather the block table; for all but decode launches, bring the index pointers."""
        most_keys = int(batch.kv_lens.max())
        columns = -(-most_keys // self._page_size)
        page_table = batch.page_table[:, :columns].index_select(0, batch.rows)
        if batch.num_decode_rows == batch.num_rows:
            return Launch(
                num_tokens=batch.num_rows,
                page_table=page_table,
                kv_lens=batch.kv_lens_device,
                most_keys=most_keys,
            )
        query_ends, kv_ends = self._ends[slot].upload(batch.query_lens, batch.kv_lens)
        return Launch(
            num_tokens=batch.num_tokens,
            page_table=page_table,
            kv_lens=batch.kv_lens_device,
            query_ends=query_ends,
            kv_ends=kv_ends,
            most_queries=int(batch.query_lens.max()),
            most_keys=most_keys,
        )

    def attend(
        self,
        q: torch.Tensor,
        layer: AttentionLayerSpec,
        plan: Launch,
        new_kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attend; see the interface. Inside a recording too."""
        assert new_kv is None, "this backend reads from the pool only"
        assert q.shape[0] == plan.num_tokens, "the queries are not those that were planned"
        # The pool allocates its memory later than this backend is made: ask at every call.
        k, v = self._pool.layer(layer.index)
        return self._kernel.attend(q, k, v, plan, layer)

    # -- CudaGraphSupport

    def prepare_capture(self, batch: Batch) -> Launch:
        """Return the launch of a graph; graphs of all sizes share one block table."""
        rows, width = batch.num_rows, batch.page_table.shape[1]
        if self._recorded is None or self._recorded.shape[0] < rows:
            shape = (max(rows, self._most_rows), width)
            self._recorded = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return Launch(
            num_tokens=rows,
            page_table=self._recorded[:rows],
            kv_lens=batch.kv_lens_device,
            most_keys=width * self._page_size,
        )

    def enqueue(self, batch: Batch, plan: Launch) -> None:
        """Gather the block table, at the head of the graph."""
        torch.index_select(batch.page_table, 0, batch.rows, out=plan.page_table)

    def prepare_replay(self, plan: Any, kv_lens: npt.NDArray[np.int32], slot: int) -> None:
        """There is nothing to plan: lengths are read on the device."""
