"""Torch references of the operations in ``minisgl.kernel.ops``: any device, obviously right."""

import torch
import torch.nn.functional as F  # noqa: N812  (the field's usual name)


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


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding (Su et al., 2021) in the half-split layout, after optional q/k norms."""
    if q_norm is not None:
        q = rms_norm(q, q_norm, norm_eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, norm_eps)
    table = cos_sin[positions].unsqueeze(1)
    rotary_dim = table.shape[-1]
    cos, sin = table.chunk(2, dim=-1)
    return _rotate(q, cos, sin, rotary_dim), _rotate(k, cos, sin, rotary_dim)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    half = rotary_dim // 2
    first, second = x[..., :half].float(), x[..., half:rotary_dim].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    if rotary_dim == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
