"""Matrix products of few rows: every weight is read once, as fast as the memory gives it.

cuBLAS takes tiles of 64 rows and a fixed number of columns: with one row, and outputs of a few
thousand, most of a large GPU waits. Measured on an H200 in microseconds, cuBLAS 13.0 beside this
kernel: one row, 2048 to 1024: 12.7 and 3.1; 1024 to 4096: 5.2 and 4.0; 3072 to 1024: 7.4 and 4.2;
5120 to 7168: 22.9 and 20.1; four rows, 2048 to 1024: 10.4 and 4.4. More rows, or wide outputs with
two to four, are cuBLAS's.

Compiled per input size, dtype and 1, 2 or 4 rows.
"""

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl

from minisgl.kernel.triton.launch import OVERLAP

_COLUMNS = 2
"""Outputs of a program: few, so that there are many programs."""

_MOST_ROWS, _MOST_OUTPUTS_OF_SEVERAL_ROWS, _MOST_OUTPUTS = 4, 2048, 65536
_MOST_INPUTS = 32768
"""A program holds so many weights of each output at once."""

_OVERLAP = tl.constexpr(OVERLAP)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias``; see ``Linear``."""
    rows = x.shape[0]
    if rows > _MOST_ROWS or not rows or not _pays(rows, weight) or x.stride(-1) != 1:
        return F.linear(x, weight, bias)
    outputs, inputs = weight.shape
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    _linear_kernel[(-(-outputs // _COLUMNS),)](
        x, weight, weight if bias is None else bias, out, rows, x.stride(0), outputs, inputs,
        (rows if rows < 3 else 4), bias is not None, _COLUMNS, triton.next_power_of_2(inputs),
        num_warps=_num_warps(inputs), launch_pdl=OVERLAP,
    )  # fmt: skip
    return out


def _pays(rows: int, weight: torch.Tensor) -> bool:
    """Whether this kernel beats cuBLAS, by the measurements above."""
    outputs, inputs = weight.shape
    most = _MOST_OUTPUTS if rows == 1 else _MOST_OUTPUTS_OF_SEVERAL_ROWS
    return outputs <= most and inputs <= _MOST_INPUTS and weight.is_contiguous()


def _num_warps(inputs: int) -> int:
    return 8 if 1024 < inputs <= 4096 or inputs > 16384 else 4


@triton.jit(do_not_specialize=["x_ptr", "bias_ptr", "rows", "x_stride", "outputs"])
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, x_stride, outputs, INPUTS: tl.constexpr,
    ROWS: tl.constexpr, BIASED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``COLUMNS`` outputs of every row. The weights depend on no kernel before: they come first."""
    if _OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, BLOCK)
    inside = k < INPUTS
    mask = (column < outputs)[:, None] & inside[None, :]
    places = column.to(tl.int64)[:, None] * INPUTS + k[None, :]
    weights = tl.load(weight_ptr + places, mask, 0.0).to(tl.float32)
    if _OVERLAP:
        tl.extra.cuda.gdc_wait()
    for row in tl.static_range(ROWS):
        x = tl.load(x_ptr + row * x_stride + k, inside & (row < rows), 0.0).to(tl.float32)
        total = tl.sum(weights * x[None, :], axis=1)
        if BIASED:
            total += tl.load(bias_ptr + column, column < outputs, 0.0).to(tl.float32)
        stored = (column < outputs) & (row < rows)
        tl.store(out_ptr + row * outputs + column, total.to(out_ptr.dtype.element_ty), stored)
