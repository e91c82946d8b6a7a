"""Routed experts in plain torch: a loop over the experts that have tokens; the reference."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

from minisgl.moe.interface import MoeBackend, MoeContext


class TorchMoeBackend(MoeBackend):
    """The reference backend, created from a ``MoeContext``."""

    def __init__(self, context: MoeContext) -> None:
        super().__init__(context)
        self._first_expert = context.local_experts.start
        self._act = _ACTIVATIONS[context.activation]

    def run_experts(
        self,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
    ) -> torch.Tensor:
        """Run each expert on its tokens; see the interface for shapes."""
        weights, local = weights.to(hidden.dtype), experts - self._first_expert
        out = torch.zeros_like(hidden)
        for expert in sorted(set(local.flatten().tolist()) & set(range(gate_up.shape[0]))):
            tokens, place = (local == expert).nonzero(as_tuple=True)
            gate, up = F.linear(hidden[tokens], gate_up[expert]).chunk(2, dim=-1)
            part = F.linear(self._act(gate) * up, down[expert])
            out.index_add_(0, tokens, part * weights[tokens, place].unsqueeze(-1))
        return out


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": _gelu_tanh,
}
