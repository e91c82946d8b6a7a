"""Routed experts in plain torch: a loop over the experts that have tokens; the reference."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

from minisgl.moe.fp8 import ExpertScales, quantize_rows
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
        *,
        scales: ExpertScales | None = None,
    ) -> torch.Tensor:
        """Run each expert on its tokens; see the interface for shapes, and for fp8."""
        weights, local = weights.to(hidden.dtype), experts - self._first_expert
        out = torch.zeros_like(hidden)
        for expert in sorted(set(local.flatten().tolist()) & set(range(gate_up.shape[0]))):
            tokens, place = (local == expert).nonzero(as_tuple=True)
            of_gate_up = None if scales is None else scales.gate_up[expert]
            of_down = None if scales is None else scales.down[expert]
            gate, up = _product(hidden[tokens], gate_up[expert], of_gate_up).chunk(2, dim=-1)
            part = _product(self._act(gate) * up, down[expert], of_down)
            out.index_add_(0, tokens, part * weights[tokens, place].unsqueeze(-1))
        return out


def _product(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return ``rows @ weight.T`` in the rows' dtype; with ``scale``, of both sides in fp8."""
    if scale is None:
        return F.linear(rows, weight)
    quantized, of_rows = quantize_rows(rows)
    sums = F.linear(quantized.float(), weight.float())
    return (sums * of_rows.unsqueeze(-1) * scale).to(rows.dtype)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": _gelu_tanh,
}
