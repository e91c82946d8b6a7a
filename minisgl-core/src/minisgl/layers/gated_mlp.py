"""The gated MLP: ``down(act(gate(x)) * up(x))`` (Shazeer, 2020)."""

import torch

from minisgl.kernel.ops import GatedActivation, OpTable
from minisgl.layers.base import Layer
from minisgl.layers.context import BuildContext
from minisgl.layers.linear import Hidden, MergedColumnLinear, RowLinear
from minisgl.layers.norm import RMSNorm


def gated_activation(name: str, ops: OpTable) -> GatedActivation:
    """Return the op of ``ModelConfig.activation``: ``silu`` or ``gelu``."""
    return {"silu": ops.silu_and_mul, "gelu": ops.gelu_and_mul}[name]


class GatedMLP(Layer):
    """A dense MLP with ``gate_proj``, ``up_proj`` and ``down_proj`` under ``prefix``."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        context: BuildContext,
        prefix: str,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.gate_up = MergedColumnLinear(
            hidden_size,
            (intermediate_size, intermediate_size),
            context,
            (f"{prefix}.gate_proj", f"{prefix}.up_proj"),
            bias=bias,
        )
        self.down = RowLinear(
            intermediate_size, hidden_size, context, f"{prefix}.down_proj", bias=bias
        )
        self._activate = gated_activation(activation, context.ops)
        self._gelu = activation == "gelu"

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` to the same shape."""
        return self.down.forward(self._activate(self.gate_up.forward(hidden)))

    def partial(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what this rank adds to ``forward``'s sum over the ranks; without biases only."""
        return self.down.partial(self._activate(self.gate_up.forward(hidden)))

    def after_norm(
        self, x: Hidden, residual: torch.Tensor, norm: RMSNorm
    ) -> tuple[Hidden, torch.Tensor]:
        """Return ``forward(norm(x + residual))``, maybe in parts, and the sum."""
        active, residual = self.gate_up.gated_after_norm(x, residual, norm, gelu=self._gelu)
        return self.down.parts(active), residual
