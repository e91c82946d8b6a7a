"""Matrix products, and what stands before and behind them in a layer: who computes which.

One row is ``one_row``'s, up to 128 are ``tile_products``' where they pay, all others cuBLAS's, with
norms and activations in kernels of their own.
"""

import torch
import torch.nn.functional as F  # noqa: N812

from minisgl.kernel.ops import add_norm
from minisgl.kernel.triton.activations import gelu_and_mul, silu_and_mul
from minisgl.kernel.triton.norms import add_rms_norm, rms_norm
from minisgl.kernel.triton.one_row import one_row_add_norm_linear, one_row_linear
from minisgl.kernel.triton.tile_products import Tiling, choose_tiling, tile_linear

_MOST_OUTPUTS = 65536
_MOST_INPUTS, _MOST_NORMED_INPUTS = 32768, 8192
"""A program of one row holds so many weights of each output at once."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias``; see ``Linear``."""
    if _is_one_row(x, weight, _MOST_INPUTS):
        return one_row_linear(x, weight, bias)
    tiling = _tiling(x, weight)
    if tiling is not None:
        return tile_linear(x, weight, bias, tiling)[0]
    return F.linear(x, weight, bias)


def linear_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Parts of the product; see ``LinearParts``."""
    if _is_one_row(x, weight, _MOST_INPUTS):
        return one_row_linear(x, weight, bias).unsqueeze(0)
    tiling = _tiling(x, weight, parts=True)
    if tiling is not None:
        return tile_linear(x, weight, bias, tiling)
    return F.linear(x, weight, bias).unsqueeze(0)


def add_norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``linear(norm(x + residual))`` and the sum; see ``AddNormLinear``."""
    whole = _whole(x, residual)
    if whole is not None and _is_one_row(whole, weight, _MOST_NORMED_INPUTS):
        return one_row_add_norm_linear(whole, residual, norm_weight, eps, weight, bias)
    normed, total = add_norm(x, residual, norm_weight, eps, rms_norm, add_rms_norm)
    return linear(normed, weight, bias), total


def add_norm_gated(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gelu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same behind a gated activation; see ``AddNormGated``."""
    whole = _whole(x, residual)
    if whole is not None and _is_one_row(whole, weight, _MOST_NORMED_INPUTS):
        return one_row_add_norm_linear(whole, residual, norm_weight, eps, weight, bias, gelu)
    normed, total = add_norm(x, residual, norm_weight, eps, rms_norm, add_rms_norm)
    tiling = _tiling(normed, weight, gated=True)
    if tiling is not None:
        return tile_linear(normed, weight, bias, tiling, gelu)[0], total
    activation = gelu_and_mul if gelu else silu_and_mul
    return activation(F.linear(normed, weight, bias)), total


def _whole(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``x`` as one part of contiguous rows beside such a residual, if that is what it is."""
    if x.dim() == 3:
        if x.shape[0] > 1:
            return None
        x = x[0]
    fits = x.is_contiguous() and (residual is None or residual.is_contiguous())
    return x if fits else None


def _is_one_row(x: torch.Tensor, weight: torch.Tensor, most_inputs: int) -> bool:
    """Whether a kernel of ``one_row`` beats cuBLAS."""
    outputs, inputs = weight.shape
    return (
        x.shape[0] == 1
        and outputs <= _MOST_OUTPUTS
        and inputs <= most_inputs
        and x.stride(-1) == 1
        and weight.is_contiguous()
    )


def _tiling(
    x: torch.Tensor, weight: torch.Tensor, *, gated: bool = False, parts: bool = False
) -> Tiling | None:
    rows, (outputs, inputs) = x.shape[0], weight.shape
    if not rows or x.stride(-1) != 1 or not weight.is_contiguous() or x.element_size() != 2:
        return None  # float32 stays exact: tensor cores would round its operands
    if gated:
        outputs //= 2
    return choose_tiling(rows, outputs, inputs, gated=gated, parts=parts)
