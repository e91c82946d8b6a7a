"""Rows in fp8: each with a scale of its own, as ``minisgl.moe.quantize_rows`` defines them."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from minisgl.kernel.triton.dispatch import dispatched
from minisgl.kernel.triton.launch import OVERLAP, wait_for_inputs
from minisgl.moe.fp8 import FP8, FP8_LEAST, FP8_MOST

_BLOCK = 8192
"""Values of a row that a program holds at once; of longer ones it reads each value twice."""

_MOST, _LEAST = tl.constexpr(FP8_MOST), tl.constexpr(FP8_LEAST)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class Fp8Product:
    """What a product of fp8 operands needs beside them.

    Attributes:
        rows: float32 scales of the rows, ``[N]``.
        outputs: float32 scales of the weights' output channels, ``[E, outputs]``, contiguous.
        dtype: of the result.
    """

    rows: torch.Tensor
    outputs: torch.Tensor
    dtype: torch.dtype


def operand(
    rows: torch.Tensor, outputs: torch.Tensor | None
) -> tuple[torch.Tensor, Fp8Product | None]:
    """Return ``rows`` ``[N, n]`` as a product takes them: quantized, if the weights have scales."""
    if outputs is None:
        return rows, None
    quantized, scales = quantize(rows)
    return quantized, Fp8Product(scales, outputs, rows.dtype)


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``rows`` ``[N, n]``, contiguous, in float8_e4m3fn, and float32 scales ``[N]``."""
    num, inputs = rows.shape
    out = torch.empty((num, inputs), dtype=FP8, device=rows.device)
    scales = torch.empty(num, dtype=torch.float32, device=rows.device)
    block = min(_BLOCK, triton.next_power_of_2(inputs))
    _quantize_kernel[(num,)](
        rows, out, scales, inputs, block,
        num_warps=min(8, max(1, block // 512)), launch_pdl=OVERLAP,
    )  # fmt: skip
    return out, scales


@dispatched
@triton.jit
def _quantize_kernel(x_ptr, out_ptr, scales_ptr, INPUTS: tl.constexpr, BLOCK: tl.constexpr):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x_ptr += row * INPUTS
    wait_for_inputs()
    x = tl.load(x_ptr + k, k < INPUTS, 0.0).to(tl.float32)
    most = tl.max(tl.abs(x), axis=0)
    for first in tl.static_range(BLOCK, INPUTS, BLOCK):
        more = tl.load(x_ptr + first + k, first + k < INPUTS, 0.0).to(tl.float32)
        most = tl.maximum(most, tl.max(tl.abs(more), axis=0))
    factor, scale = factor_and_scale(most)
    tl.store(scales_ptr + row, scale)
    out_ptr += row * INPUTS
    tl.store(out_ptr + k, to_fp8(x * factor), k < INPUTS)
    for first in tl.static_range(BLOCK, INPUTS, BLOCK):
        more = tl.load(x_ptr + first + k, first + k < INPUTS, 0.0).to(tl.float32)
        tl.store(out_ptr + first + k, to_fp8(more * factor), first + k < INPUTS)


@triton.jit
def factor_and_scale(most):
    """Return what rows whose largest absolute value is ``most`` are multiplied by, and the undoing.

    Divided as IEEE 754 says: Triton's own division may be off by two units in the last place.
    """
    most = tl.maximum(most, _LEAST)
    return tl.div_rn(tl.full(most.shape, _MOST, tl.float32), most), tl.div_rn(
        most, tl.full(most.shape, _MOST, tl.float32)
    )


@triton.jit
def to_fp8(x):
    """Round float32 of at most 448 to the nearest in float8_e4m3fn, of two to the even one."""
    if _INTERPRETED:  # whose own conversion loses carries, and cuts subnormal numbers off
        x = _nearest(x)
    return x.to(tl.float8e4nv)


@triton.jit
def _nearest(x):
    """Return the nearest float32 that float8_e4m3fn has: of 4 bits, in steps of 2**-9 or more."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 255
    step = tl.exp2(tl.maximum(exponent - 127, -6).to(tl.float32) - 3)
    # A sum of this size has no bits below a step: it is rounded there, to even.
    large = 12582912.0 * step
    return (x + large) - large
