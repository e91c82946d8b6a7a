"""The backend ``fa``: launches, eager and in CUDA graphs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from minisgl.attention import (
    AttentionBackend,
    AttentionContext,
    AttentionLayerSpec,
    Batch,
    BlockTables,
)
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
        self._tables = BlockTables(context)
        self._kernel = kernel
        rows, device = context.max_running_requests, context.device
        self._ends = [Ends(rows, device, make_event) for _ in range(2)]

    def plan(self, batch: Batch, slot: int) -> Launch:
        """Gather the block table; for all but decode launches, bring the index pointers."""
        most_keys = int(batch.kv_lens.max())
        page_table = self._tables.of(batch)
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
        """Return the launch of a graph."""
        page_table = self._tables.for_graph(batch)
        return Launch(
            num_tokens=batch.num_rows,
            page_table=page_table,
            kv_lens=batch.kv_lens_device,
            most_keys=page_table.shape[1] * self._page_size,
        )

    def enqueue(self, batch: Batch, plan: Launch) -> None:
        """Gather the block table, at the head of the graph."""
        self._tables.gather(batch, plan.page_table)

    def prepare_replay(self, plan: Any, kv_lens: npt.NDArray[np.int32], slot: int) -> None:
        """There is nothing to plan: lengths are read on the device."""
