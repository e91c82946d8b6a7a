"""Gated activations: both halves of a row are read once.

Compiled per dtype and width.
"""

import torch
import triton
import triton.language as tl

from minisgl.kernel.triton.dispatch import dispatched
from minisgl.kernel.triton.launch import OVERLAP, factors, wait_for_inputs

_BLOCK, _NUM_WARPS = 1024, 4
"""Eight elements of each half a thread."""


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` for ``x`` ``[..., 2n]``; see ``GatedActivation``."""
    return _activate(x, gelu=False)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` with the tanh approximation."""
    return _activate(x, gelu=True)


def _activate(x: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    shape, strides = x.shape, x.stride()
    if len(shape) != 2 or strides[1] != 1:
        flat = x.reshape(-1, shape[-1]).contiguous()
        return _activate(flat, gelu=gelu).view(*shape[:-1], shape[-1] // 2)
    rows, width = shape[0], shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    _gated_kernel[(rows, -(-width // _BLOCK))](
        x, out, *factors(strides[0]), width, gelu, _BLOCK, num_warps=_NUM_WARPS, launch_pdl=OVERLAP
    )
    return out


@dispatched
@triton.jit(do_not_specialize=["row_stride"])
def _gated_kernel(
    x_ptr, out_ptr,
    row_stride, FACTOR: tl.constexpr, WIDTH: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate_ptrs = x_ptr + row * row_stride * FACTOR + columns
    wait_for_inputs()
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + WIDTH, mask=mask, other=0.0).to(tl.float32)
    gated = activate(gate, up, out_ptr.dtype.element_ty, GELU)
    tl.store(out_ptr + row * WIDTH + columns, gated, mask=mask)


@triton.jit
def activate(gate, up, dtype: tl.constexpr, GELU: tl.constexpr):
    """Return ``act(gate) * up`` in ``dtype``, for float32."""
    # For GeGLU, 0.5 * (1 + tanh(y)) is the logistic function of 2y.
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    active = gate / (1.0 + tl.exp(-inner))
    # Rounded before the product, as the reference does.
    return (active.to(dtype).to(tl.float32) * up).to(dtype)
