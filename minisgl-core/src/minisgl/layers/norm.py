"""RMSNorm, alone and fused with the residual sum."""

import torch

from minisgl.layers.base import Layer, Piece
from minisgl.layers.context import BuildContext


class RMSNorm(Layer):
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float, context: BuildContext, prefix: str) -> None:
        super().__init__()
        whole = (slice(0, size),)
        piece = Piece(f"{prefix}.weight", (size,), whole, whole)
        self.weight = self.declare("weight", (size,), [piece], context, dummy="ones")
        self.eps = eps
        self._rms_norm = context.ops.rms_norm
        self._add_rms_norm = context.ops.add_rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., size]`` to the same shape."""
        return self._rms_norm(x, self.weight, self.eps)

    def add_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(norm(x + residual), x + residual)``; see ``AddRmsNorm``."""
        return self._add_rms_norm(x, residual, self.weight, self.eps)
