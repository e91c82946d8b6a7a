"""The signatures of the fused operations that layers call, and the table that holds them.

A table is built once at start-up: the torch reference of every entry, replaced where a plugin or
a Triton kernel offers a better one for the device. Layers get the table in their constructor and
call its entries directly: nothing is looked up per call.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from minisgl.kernel import reference


class RmsNorm(Protocol):
    """``x / rms(x) * weight`` over the last dimension, computed in float32."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...


class AddRmsNorm(Protocol):
    """Return ``(norm(x + residual), x + residual)``; may write into its inputs."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class GatedActivation(Protocol):
    """``act(x[..., :n]) * x[..., n:]`` for ``x`` of width ``2n``."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Rope(Protocol):
    """Rotate q ``[T, q_heads, d]`` and k ``[T, kv_heads, d]`` at ``positions`` ``[T]``.

    ``cos_sin`` is float32 ``[max_positions, rotary_dim]``, cosines first, in the half-split
    ("NeoX") layout; with a rotary dim below ``d`` the rest of each head passes unchanged.
    Optional q/k RMSNorm weights ``[d]`` are applied to each head before the rotation.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        norm_eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class OpTable:
    """One implementation of each operation."""

    rms_norm: RmsNorm = reference.rms_norm
    add_rms_norm: AddRmsNorm = reference.add_rms_norm
    silu_and_mul: GatedActivation = reference.silu_and_mul
    gelu_and_mul: GatedActivation = reference.gelu_and_mul
    rope: Rope = reference.rope
