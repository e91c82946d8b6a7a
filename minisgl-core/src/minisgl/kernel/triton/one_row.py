"""Products of one row: every weight is read once, as fast as the memory gives it.

A program holds the weights of a few outputs. They depend on no kernel before: they are loaded while
that one still runs. What comes before the product in a layer, the sum with the residual and its
norm, is computed again by every program, which is quicker than one more kernel; so is what comes
behind it, the gated activation.

Measured on an H200 in microseconds, cuBLAS 13.0 beside this kernel: 2048 to 1024: 12.7 and 3.1;
1024 to 4096: 5.2 and 4.0; 3072 to 1024: 7.4 and 4.2; 5120 to 7168: 22.9 and 20.1. The products,
norms and activation of a layer of Qwen3-0.6B: 17.8 in kernels of their own, 13.9 so; of Qwen3-14B:
189 and 178.

Compiled per sizes and dtype.
"""

import torch
import triton
import triton.language as tl

from minisgl.kernel.triton.activations import activate
from minisgl.kernel.triton.dispatch import dispatched
from minisgl.kernel.triton.launch import OVERLAP

_OVERLAP = tl.constexpr(OVERLAP)
_GELU = tl.constexpr(2)


def one_row_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``x @ weight.T + bias`` for contiguous ``x``, ``[1, in]``."""
    outputs, inputs = weight.shape
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    columns = 2
    _one_row_kernel[(-(-outputs // columns),)](
        x, x, x, weight, weight if bias is None else bias, out, x, 0.0, outputs,
        inputs, False, False, bias is not None, 0, columns,
        triton.next_power_of_2(inputs), num_warps=_num_warps(inputs, columns), launch_pdl=OVERLAP,
    )  # fmt: skip
    return out


def one_row_add_norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gelu: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``linear(norm(x + residual))``, gated unless ``gelu`` is ``None``, and the sum.

    ``x`` and ``residual`` are contiguous, ``[1, in]``. The sum is a new tensor: every program reads
    the old one.
    """
    outputs, inputs = weight.shape
    gate = 0 if gelu is None else 1 + gelu
    if gate:
        outputs //= 2
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(x)
    columns = 2 if gate else 4
    _one_row_kernel[(-(-outputs // columns),)](
        x, x if residual is None else residual, norm_weight, weight,
        weight if bias is None else bias, out, total, eps, outputs,
        inputs, True, residual is not None, bias is not None, gate, columns,
        triton.next_power_of_2(inputs), num_warps=_num_warps(inputs, columns), launch_pdl=OVERLAP,
    )  # fmt: skip
    return out, total


def _num_warps(inputs: int, columns: int) -> int:
    if columns > 2:
        inputs *= 2
    return 8 if 1024 < inputs <= 4096 or inputs > 16384 else 4


@dispatched
@triton.jit(do_not_specialize=["x_ptr", "bias_ptr", "outputs"])
def _one_row_kernel(
    x_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, total_ptr, eps, outputs,
    INPUTS: tl.constexpr, NORMED: tl.constexpr, ADDED: tl.constexpr, BIASED: tl.constexpr,
    GATE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``COLUMNS`` outputs."""
    if _OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, BLOCK)
    inside, here = k < INPUTS, column < outputs
    mask = here[:, None] & inside[None, :]
    places = column.to(tl.int64)[:, None] * INPUTS + k[None, :]
    weights = tl.load(weight_ptr + places, mask, 0.0).to(tl.float32)
    if GATE:
        half = outputs.to(tl.int64) * INPUTS
        ups = tl.load(weight_ptr + half + places, mask, 0.0).to(tl.float32)
    if NORMED:
        norm = tl.load(norm_ptr + k, inside, 0.0).to(tl.float32)
    if _OVERLAP:
        tl.extra.cuda.gdc_wait()
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + k, inside, 0.0).to(tl.float32)
    if NORMED:
        if ADDED:
            x += tl.load(residual_ptr + k, inside, 0.0).to(tl.float32)
            x = x.to(dtype).to(tl.float32)
            if tl.program_id(0) == 0:
                tl.store(total_ptr + k, x.to(dtype), inside)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / INPUTS + eps)
        x = ((x * scale).to(dtype).to(tl.float32) * norm).to(dtype).to(tl.float32)
    result = tl.sum(weights * x[None, :], axis=1)
    if BIASED:
        result += tl.load(bias_ptr + column, here, 0.0).to(tl.float32)
    if GATE:
        up = tl.sum(ups * x[None, :], axis=1)
        if BIASED:
            up += tl.load(bias_ptr + outputs + column, here, 0.0).to(tl.float32)
        gate = result.to(dtype).to(tl.float32)
        result = activate(gate, up.to(dtype).to(tl.float32), dtype, GATE == _GELU)
    tl.store(out_ptr + column, result.to(dtype), here)
