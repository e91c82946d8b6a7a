"""What an attention backend must offer, and what it is given.

A backend plans once a launch on the host and attends once a layer. It reads K and V from the
pool only: the attention layer has stored the new ones before it calls ``attend``.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from minisgl.attention.batch import Batch
from minisgl.kernel.jit import JitLoader
from minisgl.kernel.ops import OpTable
from minisgl.kvcache.interface import KVCachePool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayerSpec:
    """What is fixed about one layer's attention on this rank.

    Attributes:
        index: number of the layer in the KV pool, from 0.
        num_q_heads, num_kv_heads: on this rank, after tensor-parallel sharding.
        head_dim: elements a head.
        scale: what q . k is multiplied with before the softmax.
        sliding_window: a query at position i sees keys in (i - window, i]; ``None`` sees all.
        logit_soft_cap: scores become ``cap * tanh(score / cap)``; ``None`` leaves them.
    """

    index: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    logit_soft_cap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionContext:
    """What a backend is created with.

    Attributes:
        device, dtype: of queries and outputs.
        num_q_heads, num_kv_heads, head_dim: on this rank.
        num_layers: layers that store K and V.
        page_size: tokens a page.
        kv_pool: the pool that the backend reads; its memory is allocated later than the backend.
        max_running_requests: most rows of one launch.
        max_seq_len: most tokens of one row.
        sliding_window: whether any layer has one.
        logit_soft_cap: whether any layer has one.
        ops: the table of small fused operations.
        jit: loads a backend's own CUDA sources.
    """

    device: torch.device
    dtype: torch.dtype
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    page_size: int
    kv_pool: KVCachePool
    max_running_requests: int
    max_seq_len: int
    sliding_window: bool = False
    logit_soft_cap: bool = False
    ops: OpTable = field(default_factory=OpTable)
    jit: JitLoader = field(default_factory=JitLoader)


class CudaGraphSupport(Protocol):
    """Optional power of a backend: decode launches that are recorded once and replayed.

    A graph is recorded for a number of rows and serves any launch of so many rows or fewer; the
    rest are padding: they have length 1, the dummy page, and nobody reads their output. Recording
    and replaying one launch::

        plan = graphs.prepare_capture(batch)         # host work, before the recording
        with torch.cuda.graph(...):
            graphs.enqueue(batch, plan)              # device work at the head of the graph
            ...                                      # backend.attend(q, layer.spec, plan)
        graphs.prepare_replay(plan, kv_lens, slot)   # host work and copies, before each replay
        graph.replay()

    Whatever a recorded kernel reads lies in buffers that the plan keeps for as long as the graph
    lives. Graphs of all sizes run on one stream, one after the other: they may share buffers.
    """

    def prepare_capture(self, batch: Batch) -> Any:
        """Return the plan to record ``batch`` with; its device tensors are the graph's own.

        With ``batch.shared``, for a backend that takes shared prefixes, every replay reads anew
        what these tensors say then.
        """

    def enqueue(self, batch: Batch, plan: Any) -> None:
        """Launch what comes before the first layer, from ``batch``'s device tensors alone.

        Recorded into the graph: it allocates nothing that outlives it and never synchronises.
        """

    def prepare_replay(self, plan: Any, kv_lens: npt.NDArray[np.int32], slot: int) -> None:
        """Plan the next replay on the host and copy the outcome to the device, asynchronously.

        Args:
            plan: from ``prepare_capture``.
            kv_lens: int32 ``[size]``, host: tokens of each row, 1 for padding.
            slot: 0 or 1, alternating: host buffers of one slot are left alone while copies from
                the other's may still run.
        """


class AttentionBackend(ABC):
    """Attention over the paged pool.

    Example of the calls of one launch::

        batch.plan = backend.plan(batch, slot)          # host work, once
        for layer in layers:
            out = backend.attend(q, layer.spec, batch.plan)
    """

    cuda_graphs: CudaGraphSupport | None = None
    """How this backend takes part in CUDA graphs; ``None``: it does not."""

    takes_shared_prefixes: bool = False
    """Recorded decode launches read the pages that ``batch.shared`` names once; others may."""

    store_fusion: bool = False
    """``attend`` stores K and V itself: the layer skips the store and passes ``new_kv``."""

    @abstractmethod
    def plan(self, batch: Batch, slot: int) -> Any:
        """Prepare one launch; returns what ``attend`` needs, valid until its step has finished.

        Args:
            batch: the launch. The backend keeps no reference to its host arrays.
            slot: 0 or 1, alternating: buffers of one slot are not touched while the other's
                launch may still run.
        """

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        layer: AttentionLayerSpec,
        plan: Any,
        new_kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the attention output ``[T, q_heads, head_dim]`` for ``q`` of that shape.

        Causal within each row. Reads K and V of ``layer`` from the pool and changes nothing,
        unless the backend declares ``store_fusion``: then it stores ``new_kv`` (k and v,
        ``[T, kv_heads, head_dim]``) first.
        """
