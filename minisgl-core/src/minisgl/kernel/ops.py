"""The signatures of the fused operations that layers call, and the table that holds them.

A table is built once at start-up: the torch reference of every entry, replaced where a plugin or
a Triton kernel offers a better one for the device. Layers get the table in their constructor and
call its entries directly: nothing is looked up per call.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from minisgl.kernel import reference
from minisgl.kernel.rotation import Rotation


class RmsNorm(Protocol):
    """``x / rms(x) * weight`` over the last dimension, computed in float32."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the normed ``x``."""
        ...


class AddRmsNorm(Protocol):
    """Return ``(norm(x + residual), x + residual)``; may write into its inputs."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normed sum and the sum."""
        ...


class GatedActivation(Protocol):
    """``act(x[..., :n]) * x[..., n:]`` for ``x`` of width ``2n``."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[..., n]``."""
        ...


class Rope(Protocol):
    """Rotate the q and k heads of one layer; returns ``(q, k)``.

    ``qk`` is ``[T, q_heads + kv_heads, d]``, q heads first, and may be a view of the projection's
    output with a longer row stride; an implementation may write into it. ``rotation`` is this
    launch's: see ``Rotation``. With a rotary dim below ``d`` the rest of each head passes
    unchanged. Optional q/k RMSNorm weights ``[d]`` are applied to each head before the rotation.
    """

    def __call__(
        self,
        qk: torch.Tensor,
        num_q_heads: int,
        rotation: Rotation,
        *,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        norm_eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotated q ``[T, q_heads, d]`` and k ``[T, kv_heads, d]``."""
        ...


class Linear(Protocol):
    """``x @ weight.T + bias`` for ``x`` ``[T, in]`` and ``weight`` ``[out, in]`` of any strides."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``[T, out]``."""
        ...


@dataclass(frozen=True, slots=True)
class OpTable:
    """One implementation of each operation."""

    rms_norm: RmsNorm = reference.rms_norm
    add_rms_norm: AddRmsNorm = reference.add_rms_norm
    silu_and_mul: GatedActivation = reference.silu_and_mul
    gelu_and_mul: GatedActivation = reference.gelu_and_mul
    rope: Rope = reference.rope
    linear: Linear = reference.linear
