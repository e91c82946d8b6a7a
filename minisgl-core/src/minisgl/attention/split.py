"""A backend whose layers can be told from the rest of a forward pass.

What a prefill launches for each token (norms, products, rotation) depends on the number of tokens
alone and can be recorded; attention depends on the lengths of rows too. So a pass that is recorded
is cut where the model attends: see ``minisgl.engine.prefill_graphs``.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from minisgl.attention.batch import Batch
from minisgl.attention.interface import AttentionBackend, AttentionLayerSpec

NewKV = tuple[torch.Tensor, torch.Tensor] | None


class Seam(Protocol):
    """What happens where a recorded pass is cut."""

    def cut(self, q: torch.Tensor, layer: AttentionLayerSpec, new_kv: NewKV) -> torch.Tensor:
        """Return a tensor of ``q``'s shape that will hold the attention's output."""
        ...


@dataclass(frozen=True, slots=True)
class CutPlan:
    """As ``batch.plan``: the model does not attend, the seam is told instead."""

    seam: Seam


class SplitBackend(AttentionBackend):
    """Does what ``backend`` does, except for plans that are a ``CutPlan``."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.cuda_graphs = backend.cuda_graphs
        self.store_fusion = backend.store_fusion
        self.takes_shared_prefixes = backend.takes_shared_prefixes

    def plan(self, batch: Batch, slot: int) -> Any:
        """Plan with the backend."""
        return self.backend.plan(batch, slot)

    def attend(
        self,
        q: torch.Tensor,
        layer: AttentionLayerSpec,
        plan: Any,
        new_kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attend with the backend, or cut."""
        if type(plan) is CutPlan:
            return plan.seam.cut(q, layer, new_kv)
        return self.backend.attend(q, layer, plan, new_kv)
