"""One backend for prefill and another for decode, behind the interface of a single one."""

from dataclasses import dataclass
from typing import Any

import torch

from minisgl.attention.batch import Batch
from minisgl.attention.interface import AttentionBackend, AttentionLayerSpec, CudaGraphSupport
from minisgl.errors import UnsupportedBackendError


@dataclass(frozen=True, slots=True)
class RoutedPlan:
    """A plan, and the backend that made it."""

    backend: AttentionBackend
    plan: Any


class HybridBackend(AttentionBackend):
    """Sends a launch of decode rows to ``decode`` and any other launch to ``prefill``.

    A mixed launch needs one kernel for both phases and goes to ``prefill``. Neither backend may
    fuse the store unless both do: the layer decides once whether it stores.

    Args:
        prefill, decode: the backends.
        graphs: records decode launches; by default, as ``decode`` does.
        takes_shared_prefixes: ``graphs`` does, even if ``decode`` does not.
    """

    def __init__(
        self,
        prefill: AttentionBackend,
        decode: AttentionBackend,
        graphs: CudaGraphSupport | None = None,
        *,
        takes_shared_prefixes: bool = False,
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.cuda_graphs = graphs or decode.cuda_graphs
        if prefill.store_fusion != decode.store_fusion:
            names = type(prefill).__name__, type(decode).__name__
            raise UnsupportedBackendError(
                f"{names[0]} and {names[1]} cannot be a pair: one stores K and V itself and the "
                "other leaves that to the layer; set attention.backend to one of them, or to a "
                "pair that agrees"
            )
        self.store_fusion = prefill.store_fusion
        self.takes_shared_prefixes = takes_shared_prefixes or decode.takes_shared_prefixes

    def plan(self, batch: Batch, slot: int) -> RoutedPlan:
        """Plan with the backend that this launch's phase belongs to."""
        decode_only = batch.num_decode_rows == batch.num_rows
        backend = self.decode if decode_only else self.prefill
        return RoutedPlan(backend, backend.plan(batch, slot))

    def attend(
        self,
        q: torch.Tensor,
        layer: AttentionLayerSpec,
        plan: Any,
        new_kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attend with the backend that made the plan: a recorded one is the decode backend's."""
        if type(plan) is RoutedPlan:
            return plan.backend.attend(q, layer, plan.plan, new_kv)
        return self.decode.attend(q, layer, plan, new_kv)
