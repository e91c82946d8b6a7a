"""RMSNorm, alone and with the residual sum: a row is read once and stays in registers.

Compiled per dtype, width, number of heads and distance of heads.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from minisgl.kernel.triton.dispatch import dispatched
from minisgl.kernel.triton.launch import OVERLAP, factors, wait_for_inputs

_TILE = 1024
"""Elements of a program that takes several narrow rows."""

_MANY = 4096
"""Elements of a row that is wide: on an H200 a norm of 256 rows of 5120 takes 3.7 us, not 4.4."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm over the last dimension of ``x`` ``[T, n]`` or ``[T, heads, n]``; see ``RmsNorm``."""
    shape, strides = x.shape, x.stride()
    if strides[-1] != 1 or len(shape) not in (2, 3):
        return rms_norm(x.reshape(-1, shape[-1]).contiguous(), weight, eps).view(shape)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    heads, head_stride = (1, 0) if len(shape) == 2 else (shape[1], strides[1])
    rows, width = shape[0] * heads, shape[-1]
    tile_rows, block, num_warps = _tiling(width)
    _rms_norm_kernel[(-(-rows // tile_rows),)](
        x, weight, out, eps, rows, *factors(strides[0]), heads, head_stride, width,
        tile_rows, block, num_warps=num_warps, launch_pdl=OVERLAP,
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the sum into ``residual`` and its norm into ``x``, each ``[T, n]``; returns both.

    Of several parts ``[S, T, n]`` the norm is a new tensor.
    """
    shape, strides, others = x.shape, x.stride(), residual.stride()
    if len(shape) == 3 and len(others) == 2:
        return _add_parts(x, residual, weight, eps)
    if len(shape) != 2 or strides[1] != 1 or others[1] != 1:
        flat = x.reshape(-1, shape[-1]).contiguous()
        normed, total = add_rms_norm(flat, residual.reshape(flat.shape).contiguous(), weight, eps)
        return normed.view(shape), total.view(shape)
    rows, width = shape
    _, block, num_warps = _tiling(width)
    _add_rms_norm_kernel[(rows,)](
        x, residual, weight, x, eps, *factors(strides[0]), *factors(others[0]), 0, 1, width, block,
        num_warps=num_warps, launch_pdl=OVERLAP,
    )  # fmt: skip
    return x, residual


def _add_parts(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_parts, rows, width = parts.shape
    if num_parts == 1 and parts.dtype == residual.dtype:
        return add_rms_norm(parts[0], residual, weight, eps)
    if not parts.is_contiguous() or residual.stride(1) != 1:
        return add_rms_norm(parts.contiguous(), residual.contiguous(), weight, eps)
    out = torch.empty((rows, width), dtype=residual.dtype, device=residual.device)
    _, block, num_warps = _tiling(width)
    _add_rms_norm_kernel[(rows,)](
        parts, residual, weight, out, eps, *factors(width), *factors(residual.stride(0)),
        rows, num_parts, width, block, num_warps=num_warps, launch_pdl=OVERLAP,
    )  # fmt: skip
    return out, residual


@lru_cache
def _tiling(width: int) -> tuple[int, int, int]:
    """Return rows of a program, elements of a row, and warps.

    Eight elements a thread, with 16-bit ones a load of 16 bytes; narrow rows share a program. Of
    wide ones a thread has more: many warps wait longer for each other than they save.
    """
    block = triton.next_power_of_2(width)
    tile_rows = max(1, _TILE // block)
    if block > _MANY:
        return tile_rows, block, 8
    return tile_rows, block, max(tile_rows * block // 256, 1)


@dispatched
@triton.jit(do_not_specialize=["num_rows", "row_stride"])
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, eps, num_rows,
    row_stride, FACTOR: tl.constexpr, HEADS: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = columns < WIDTH if TILE_ROWS == 1 else (columns < WIDTH) & (rows < num_rows)
    starts = (rows // HEADS) * row_stride * FACTOR + (rows % HEADS) * HEAD_STRIDE
    wait_for_inputs()
    weight = tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0)
    x = tl.load(x_ptr + starts + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / WIDTH + eps)
    # Rounded before the weight, as the reference does.
    normed = (x * scale).to(out_ptr.dtype.element_ty).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + rows * WIDTH + columns, normed.to(out_ptr.dtype.element_ty), mask=mask)


@dispatched
@triton.jit(do_not_specialize=["x_stride", "residual_stride", "rows"])
def _add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, eps,
    x_stride, X_FACTOR: tl.constexpr, residual_stride, RESIDUAL_FACTOR: tl.constexpr,
    rows, PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The norm has the strides of ``x``; part ``s`` of row ``r`` is row ``s * rows + r``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    residual_ptrs = residual_ptr + row * residual_stride * RESIDUAL_FACTOR + columns
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs()
    x = tl.load(x_ptr + row * x_stride * X_FACTOR + columns, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        place = (row + part * rows) * x_stride * X_FACTOR
        x += tl.load(x_ptr + place + columns, mask=mask, other=0.0).to(tl.float32)
    x = x.to(out_ptr.dtype.element_ty).to(tl.float32)
    residual = tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    total = (x + residual).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptrs, total, mask=mask)
    rounded = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(rounded * rounded, axis=0) / WIDTH + eps)
    normed = (rounded * scale).to(out_ptr.dtype.element_ty).to(tl.float32) * weight
    place = row * x_stride * X_FACTOR
    tl.store(out_ptr + place + columns, normed.to(out_ptr.dtype.element_ty), mask=mask)
