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
    """Return ``(rms_norm(x + residual), x + residual)``; ``x`` may be parts, ``[S, T, n]``."""
    if x.dim() > residual.dim():
        x = x.sum(0, dtype=torch.float32).to(residual.dtype)
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


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> None:
    """Write K and V to their slots.

    A slot of -1 becomes slot 0, which lies in the dummy page and is never read by a real row.
    """
    slots = slots.clamp_min(0)
    k_pool.index_copy_(0, slots, k)
    v_pool.index_copy_(0, slots, v)


def page_indices(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    page_size: int,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_lens: torch.Tensor,
) -> None:
    """Flatten the pages of rows; entries of ``indices`` beyond the last row's are left alone."""
    num_pages = (kv_lens + page_size - 1) // page_size
    last_page_lens.copy_(kv_lens - (num_pages - 1) * page_size)
    indptr[:1].zero_()  # a 0 assigned to an element is copied from the host, which waits
    torch.cumsum(num_pages, 0, dtype=torch.int32, out=indptr[1:])
    # Columns behind a row's last page write that page once more, where it is already: so shapes
    # depend on no length, and nothing has to wait for the device.
    columns = torch.arange(page_table.shape[1], device=page_table.device)
    columns = torch.minimum(columns, num_pages.unsqueeze(1) - 1)
    pages = page_table[rows.unsqueeze(1), columns]
    indices[indptr[:-1].unsqueeze(1) + columns] = pages


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    if x.dtype == torch.float32:
        return torch.addcmul(x * cos, swapped, sin)
    return torch.addcmul(x.float() * cos, swapped.float(), sin).to(x.dtype)
