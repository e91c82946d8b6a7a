"""Attention through our own Triton kernels: NVIDIA GPUs from capability 8.0, no other package.

Nothing is planned: kernels read lengths and pages on the device, so a decode graph is replayed as
it is. See ``minisgl.kernel.triton.attention``, ``prefill_attention`` and ``shared_prefix`` there.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from minisgl.attention.batch import Batch, SharedPrefixes
from minisgl.attention.interface import AttentionBackend, AttentionContext, AttentionLayerSpec
from minisgl.kernel.triton import attention as kernels
from minisgl.kernel.triton.attention import Cut
from minisgl.kernel.triton.attention_step import PagedRows, Scores
from minisgl.kernel.triton.prefill_attention import paged_prefill
from minisgl.kernel.triton.shared_prefix import choose_prefix_splits, shared_decode

_MULTIPROCESSORS_ELSEWHERE = 16
"""What splits are chosen for where there is no GPU."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """A launch: decode rows, then prefill rows, each ``None`` if there are none.

    ``cut`` and ``shared`` are of the decode rows; ``query_ends`` of the prefill rows, int32
    on the device.
    """

    num_decode_rows: int
    decode: PagedRows | None
    cut: Cut
    prefill: PagedRows | None
    query_ends: torch.Tensor | None
    shared: SharedPrefixes | None


class _Ends:
    """Where the queries of one slot's rows end: pinned memory, and when it may be written again."""

    def __init__(self, most_rows: int, device: torch.device) -> None:
        self._device = device
        self._copied: torch.cuda.Event | None = None
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(most_rows + 1, dtype=torch.int32, pin_memory=on_gpu)
        if on_gpu:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def upload(self, query_lens: npt.NDArray[np.int32]) -> torch.Tensor:
        """Return 0 and the running sum, int32 on the device, as a tensor of its own."""
        if self._copied is not None:
            self._copied.synchronize()  # two steps ago
        host = self._host[: len(query_lens) + 1]
        np.cumsum(query_lens, out=host.numpy()[1:])
        ends = torch.empty_like(host, device=self._device, pin_memory=False)
        ends.copy_(host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return ends


class TritonAttentionBackend(AttentionBackend):
    """The backend ``triton``, created from an ``AttentionContext``."""

    takes_shared_prefixes = True

    def __init__(self, context: AttentionContext) -> None:
        self.cuda_graphs = self
        self._pool = context.kv_pool
        self._page_size = context.page_size
        self._num_kv_heads = context.num_kv_heads
        self._most_rows = context.max_running_requests
        self._ends = [_Ends(context.max_running_requests, context.device) for _ in range(2)]
        self._multiprocessors = _MULTIPROCESSORS_ELSEWHERE
        if context.device.type == "cuda":
            properties = torch.cuda.get_device_properties(context.device)
            self._multiprocessors = properties.multi_processor_count

    def plan(self, batch: Batch, slot: int) -> _Plan:
        """Say where the rows are; of prefill rows, bring the ends of their queries."""
        num_decode, query_ends = batch.num_decode_rows, None
        if num_decode < batch.num_rows:
            query_ends = self._ends[slot].upload(batch.query_lens[num_decode:])
        return self._plan(batch, num_decode, query_ends)

    def attend(
        self,
        q: torch.Tensor,
        layer: AttentionLayerSpec,
        plan: _Plan,
        new_kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attend with decode rows, then with prefill rows; see the interface for shapes."""
        assert new_kv is None, "this backend reads from the pool only"
        pool = self._pool.flat_layer(layer.index)
        assert pool is not None, "this backend reads plain tensors"
        scores = Scores(
            scale=layer.scale, window=layer.sliding_window or 0, cap=layer.logit_soft_cap or 0.0
        )
        parts = []
        if plan.decode is not None:
            parts.append(self._decode(q[: plan.num_decode_rows], pool, plan, scores))
        if plan.prefill is not None:
            assert plan.query_ends is not None
            rows = q[plan.num_decode_rows :]
            parts.append(
                paged_prefill(rows, *pool, plan.prefill, scores, plan.query_ends, self._most_rows)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(
        self,
        q: torch.Tensor,
        pool: tuple[torch.Tensor, torch.Tensor],
        plan: _Plan,
        scores: Scores,
    ) -> torch.Tensor:
        """Attend with decode rows; a window reaches back over part of a shared prefix only."""
        assert plan.decode is not None
        if plan.shared is None or scores.window:
            return kernels.paged_decode(q, *pool, plan.decode, scores, plan.cut)
        splits = choose_prefix_splits(q, self._num_kv_heads, self._multiprocessors)
        shared = plan.shared.members, plan.shared.groups, plan.shared.starts
        return shared_decode(q, *pool, plan.decode, scores, shared, (splits, plan.cut.splits))

    # -- CudaGraphSupport

    def prepare_capture(self, batch: Batch) -> _Plan:
        """Return the plan of a graph: the batch's device tensors are all that it reads."""
        plan = self._plan(batch, batch.num_rows, None)
        assert plan.decode is not None
        if batch.num_rows == 1:
            return plan
        order = torch.zeros(batch.num_rows, dtype=torch.int32, device=batch.rows.device)
        return replace(plan, decode=replace(plan.decode, order=order))

    def enqueue(self, batch: Batch, plan: _Plan) -> None:
        """Order the rows by their lengths."""
        assert plan.decode is not None
        if plan.decode.order is not None:
            kernels.longest_first(batch.kv_lens_device, plan.decode.order)

    def prepare_replay(self, plan: Any, kv_lens: npt.NDArray[np.int32], slot: int) -> None:
        """There is nothing to plan: lengths are read on the device."""

    def _plan(self, batch: Batch, num_decode: int, query_ends: torch.Tensor | None) -> _Plan:
        def rows(which: slice) -> PagedRows:
            return PagedRows(
                page_table=batch.page_table,
                rows=batch.rows[which],
                kv_lens=batch.kv_lens_device[which],
                page_size=self._page_size,
            )

        cut = kernels.choose_cut(max(1, num_decode), self._num_kv_heads, self._multiprocessors)
        return _Plan(
            num_decode_rows=num_decode,
            decode=rows(slice(0, num_decode)) if num_decode else None,
            cut=cut,
            prefill=None if query_ends is None else rows(slice(num_decode, None)),
            query_ends=query_ends,
            shared=batch.shared,
        )
