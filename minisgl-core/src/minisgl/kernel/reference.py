"""Torch references of the operations in ``minisgl.kernel.ops``: any device, obviously right."""

import torch
import torch.nn.functional as F  # noqa: N812  (the field's usual name)

from minisgl.kernel.rotation import Rotation


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm in float32 (Zhang and Sennrich, 2019), as transformers computes it."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(rms_norm(x + residual), x + residual)``."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """SwiGLU (Shazeer, 2020): ``silu(gate) * up``."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """GeGLU with the tanh approximation: ``gelu(gate) * up``."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias``."""
    return F.linear(x, weight, bias)


def rope(
    qk: torch.Tensor,
    num_q_heads: int,
    rotation: Rotation,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding (Su et al., 2021) in the half-split layout, after optional q/k norms."""
    if q_norm is not None and k_norm is not None:
        q = rms_norm(qk[:, :num_q_heads], q_norm, norm_eps)
        qk = torch.cat((q, rms_norm(qk[:, num_q_heads:], k_norm, norm_eps)), dim=1)
    cos, sin = rotation.rows
    rotary_dim = cos.shape[-1]
    if rotary_dim == qk.shape[-1]:
        qk = _rotate(qk, cos, sin)
    else:
        qk = torch.cat((_rotate(qk[..., :rotary_dim], cos, sin), qk[..., rotary_dim:]), dim=-1)
    return qk[:, :num_q_heads], qk[:, num_q_heads:]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    if x.dtype == torch.float32:
        return torch.addcmul(x * cos, swapped, sin)
    return torch.addcmul(x.float() * cos, swapped.float(), sin).to(x.dtype)
