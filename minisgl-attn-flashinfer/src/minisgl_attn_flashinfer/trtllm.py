"""The backend ``trtllm``: decode through TensorRT-LLM's kernels in FlashInfer, without any plan.

``trtllm_batch_decode_with_kv_cache`` checks, reshapes and converts at every call. Here its modules
are called directly, with arguments in the order of FlashInfer 0.6.12 (``csrc/xqa/xqa_wrapper.cu``
and ``csrc/trtllm_fmha_kernel_launcher.cu``); a test on a card compares results.

Both kernels read lengths and a block table on the device. How many pieces rows are split into
depends on their number and on the table's width: fixed for a recorded launch, so that a graph is
replayed as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

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
from minisgl.errors import UnsupportedBackendError

_XQA_SCRATCH_BYTES_PER_SM = 20 * 2**10
"""Of a piece of a row, at most: 16 query heads of 256 float16, and their maxima and sums. A launch
has no more pieces than the device has multiprocessors, or does not split."""

_GEN_COUNTER_BYTES = 8 * 2**20
_GEN_WORKSPACE_BYTES = 128 * 2**20
"""What FlashInfer's own users give trtllm-gen; counters come first in it."""


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """Where a launch's rows find their pages; int32, on the device.

    Attributes:
        page_table: ``[R, columns]``.
        kv_lens: ``[R]``.
        most_keys: tokens that the table has room for, in a row.
    """

    page_table: torch.Tensor
    kv_lens: torch.Tensor
    most_keys: int


KV = tuple[torch.Tensor, torch.Tensor]
"""Of one layer's pool, ``[pages, page_size, kv_heads, head_dim]`` each."""


class DecodeRun(Protocol):
    """One of the two kernels."""

    def __call__(
        self,
        q: torch.Tensor,
        pool: KV,
        out: torch.Tensor,
        launch: DecodeLaunch,
        scale: float,
    ) -> None:
        """Attend one layer: q and out ``[R, q_heads, head_dim]``, the layer's K and V."""
        ...


class Xqa:
    """xqa, for Hopper (and 12.x): its module is compiled for one shape.

    Args:
        run: ``xqa_wrapper`` of the module.
        context: of the engine.
        num_sms: multiprocessors of the device.
        pdl: let it start while the kernel before it ends.
    """

    def __init__(
        self, run: Callable[..., Any], context: AttentionContext, num_sms: int, *, pdl: bool
    ) -> None:
        self._run = run
        self._num_sms = num_sms
        self._num_kv_heads = context.num_kv_heads
        self._root_of_dim = context.head_dim**0.5
        self._most_rows = context.max_running_requests
        self._pdl = pdl
        # Counters of each row and KV head. They begin at 0, and every launch leaves them there.
        self._semaphores = torch.zeros(
            self._most_rows * self._num_kv_heads, dtype=torch.int32, device=context.device
        )
        self._scratch = torch.zeros(
            num_sms * _XQA_SCRATCH_BYTES_PER_SM, dtype=torch.uint8, device=context.device
        )

    def __call__(
        self,
        q: torch.Tensor,
        pool: KV,
        out: torch.Tensor,
        launch: DecodeLaunch,
        scale: float,
    ) -> None:
        """Attend; see ``DecodeRun``."""
        rows = q.shape[0]
        assert rows <= self._most_rows, f"{rows} rows in a launch, room for {self._most_rows}"
        self._run(
            False,  # not its fp8 kernel
            self._num_sms,
            self._num_kv_heads,
            0,  # no window
            scale * self._root_of_dim,  # on top of 1 / sqrt(head_dim)
            None,
            out,
            1.0,
            q.contiguous(),  # it takes no strides of q; of K and V, pages as NHD, it does
            None,
            *pool,
            None,
            None,
            launch.page_table,
            launch.most_keys,
            launch.kv_lens,
            rows,
            1.0,
            None,
            1,  # query a row
            None,
            self._semaphores,
            self._scratch,
            self._pdl,
        )


class TrtllmGen:
    """trtllm-gen, for Blackwell's 10.x.

    Args:
        run: ``trtllm_paged_attention_decode`` of its module.
        context: of the engine.
        num_sms: multiprocessors of the device.
        pdl: let it start while the kernel before it ends.
    """

    def __init__(
        self, run: Callable[..., Any], context: AttentionContext, num_sms: int, *, pdl: bool
    ) -> None:
        self._run = run
        self._num_sms = num_sms
        self._pdl = pdl
        size = _GEN_COUNTER_BYTES + _GEN_WORKSPACE_BYTES
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=context.device)

    def __call__(
        self,
        q: torch.Tensor,
        pool: KV,
        out: torch.Tensor,
        launch: DecodeLaunch,
        scale: float,
    ) -> None:
        """Attend; see ``DecodeRun``."""
        # It names the head before the token; strides say where they are.
        k, v = (part.transpose(-3, -2) for part in pool)
        self._run(
            out,
            None,
            q,
            k,
            v,
            self._workspace,
            launch.page_table,
            launch.kv_lens,
            1,  # query a row
            launch.most_keys,
            scale,
            1.0,
            -1.0,
            -1,
            0,
            q.shape[0],
            -1,  # no window
            0,
            self._num_sms,
            self._pdl,
            self._workspace.numel(),
            None,
            None,
            None,
            None,
            None,
            True,  # K and V have one block table
            None,
            0,
            0,
        )


class TrtllmBackend(AttentionBackend):
    """Decode launches, eager and in CUDA graphs; made by ``create_trtllm``.

    Args:
        context: of the engine.
        run: the kernel.
    """

    def __init__(self, context: AttentionContext, run: DecodeRun) -> None:
        self.cuda_graphs = self
        self._pool = context.kv_pool
        self._page_size = context.page_size
        self._tables = BlockTables(context)
        self._run = run

    def plan(self, batch: Batch, slot: int) -> DecodeLaunch:  # noqa: ARG002
        """Gather the block table.

        Raises:
            UnsupportedBackendError: some row is not decoding.
        """
        if batch.num_decode_rows < batch.num_rows:
            raise UnsupportedBackendError(
                "backend 'trtllm' serves decode only; set attention.backend to a pair whose first "
                "one prefills, such as flashinfer,trtllm"
            )
        return self._launch(batch, self._tables.of(batch))

    def attend(
        self,
        q: torch.Tensor,
        layer: AttentionLayerSpec,
        plan: DecodeLaunch,
        new_kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attend; see the interface. Inside a recording too."""
        assert new_kv is None, "this backend reads from the pool only"
        assert q.shape[0] == len(plan.kv_lens), "the queries are not those that were planned"
        out = q.new_empty(q.shape)
        self._run(q, self._pool.layer(layer.index), out, plan, layer.scale)
        return out

    # -- CudaGraphSupport

    def prepare_capture(self, batch: Batch) -> DecodeLaunch:
        """Return the launch of a graph."""
        return self._launch(batch, self._tables.for_graph(batch))

    def enqueue(self, batch: Batch, plan: DecodeLaunch) -> None:
        """Gather the block table, at the head of the graph."""
        self._tables.gather(batch, plan.page_table)

    def prepare_replay(self, plan: Any, kv_lens: npt.NDArray[np.int32], slot: int) -> None:
        """There is nothing to plan: lengths are read on the device."""

    def _launch(self, batch: Batch, table: torch.Tensor) -> DecodeLaunch:
        return DecodeLaunch(table, batch.kv_lens_device, table.shape[1] * self._page_size)
