"""Few tokens: each assignment by itself, without sorting, as fast as the memory gives its weights.

Two experts that several tokens share are read once for each of them, so this pays only as long as
that is rare. The second product sums over a token's experts itself. With weights in fp8 every
program quantizes the rows that it multiplies, which it has to read anyway.
"""

import torch
import triton
import triton.language as tl

from minisgl.kernel.triton.activations import activate
from minisgl.kernel.triton.dispatch import dispatched
from minisgl.kernel.triton.launch import OVERLAP, wait_for_inputs
from minisgl_moe_triton.configs import Columns
from minisgl_moe_triton.kernels.quantize import factor_and_scale, to_fp8
from minisgl_moe_triton.kernels.routing import Routed

_OVERLAP = tl.constexpr(OVERLAP)


def few_gate_up(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    routed: Routed,
    columns: Columns,
    *,
    gelu: bool,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``act(gate) * up`` of each assignment, ``[T * top_k, inner]``.

    Args:
        hidden: ``[T, hidden]``, contiguous.
        weight: ``[E, 2 * inner, hidden]``, gate rows first.
        routed: experts of each token.
        columns: outputs of a program.
        gelu: the activation; else SiLU.
        scale: float32 ``[E, 2 * inner]``, of weights in fp8.
    """
    outputs, inputs = weight.shape[1] // 2, weight.shape[2]
    num, top_k = routed.experts.numel(), routed.experts.shape[1]
    out = torch.empty((num, outputs), dtype=hidden.dtype, device=hidden.device)
    block = min(columns.inputs, triton.next_power_of_2(inputs))
    _few_gate_up_kernel[(-(-outputs // columns.outputs), num)](
        hidden, weight, routed.experts, out, hidden if scale is None else scale, routed.first,
        len(weight), outputs, inputs, top_k, gelu, scale is not None, columns.outputs, block,
        num_warps=columns.warps, launch_pdl=OVERLAP,
    )  # fmt: skip
    return out


def few_down(
    rows: torch.Tensor,
    weight: torch.Tensor,
    routed: Routed,
    columns: Columns,
    *,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sums ``[T, hidden]`` of ``rows`` ``[T * top_k, inner]``.

    Args:
        rows: of the first product.
        weight: ``[E, hidden, inner]``.
        routed: experts and weights of each token.
        columns: outputs of a program.
        scale: float32 ``[E, hidden]``, of weights in fp8.
    """
    outputs, inputs = weight.shape[1], weight.shape[2]
    tokens, top_k = routed.experts.shape
    out = torch.empty((tokens, outputs), dtype=rows.dtype, device=rows.device)
    block = min(columns.inputs, triton.next_power_of_2(inputs))
    _few_down_kernel[(-(-outputs // columns.outputs), tokens)](
        rows, weight, routed.experts, routed.weights, out, rows if scale is None else scale,
        routed.first, len(weight), outputs, inputs, top_k, triton.next_power_of_2(top_k),
        scale is not None, columns.outputs, block,
        num_warps=columns.warps, launch_pdl=OVERLAP,
    )  # fmt: skip
    return out


@dispatched
@triton.jit(do_not_specialize=["held", "experts"])
def _few_gate_up_kernel(
    x_ptr, weight_ptr, experts_ptr, out_ptr, scale_ptr, held, experts,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, TOP_K: tl.constexpr, GELU: tl.constexpr,
    FP8: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``COLUMNS`` outputs of one assignment."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    assignment = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK)
    here = (column < OUTPUTS)[:, None]
    wait_for_inputs()
    expert = tl.load(experts_ptr + assignment).to(tl.int64) - held
    if (expert < 0) | (expert >= experts):
        return
    places = (expert * (2 * OUTPUTS) + column)[:, None] * INPUTS
    x_ptrs = x_ptr + assignment // TOP_K * INPUTS
    gate = tl.zeros((COLUMNS, BLOCK), tl.float32)
    up = tl.zeros((COLUMNS, BLOCK), tl.float32)
    for first in tl.static_range(0, INPUTS, BLOCK):
        inner = first + k
        mask = here & (inner < INPUTS)[None, :]
        ptrs = weight_ptr + places + inner[None, :]
        gates = tl.load(ptrs, mask, 0.0)
        ups = tl.load(ptrs + OUTPUTS * INPUTS, mask, 0.0)
        x = tl.load(x_ptrs + inner, inner < INPUTS, 0.0).to(tl.float32)
        if FP8:
            if first == 0:  # with weights on their way
                most = tl.max(tl.abs(x), axis=0)
                for after in tl.static_range(BLOCK, INPUTS, BLOCK):
                    more = tl.load(x_ptrs + after + k, after + k < INPUTS, 0.0).to(tl.float32)
                    most = tl.maximum(most, tl.max(tl.abs(more), axis=0))
                factor, x_scale = factor_and_scale(most)
            x = to_fp8(x * factor).to(tl.float32)
        gate += gates.to(tl.float32) * x[None, :]
        up += ups.to(tl.float32) * x[None, :]
    dtype = out_ptr.dtype.element_ty
    gate_sum, up_sum = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if FP8:
        scale_ptrs = scale_ptr + expert * (2 * OUTPUTS) + column
        gate_sum *= tl.load(scale_ptrs, column < OUTPUTS, 0.0) * x_scale
        up_sum *= tl.load(scale_ptrs + OUTPUTS, column < OUTPUTS, 0.0) * x_scale
    gate_sum, up_sum = gate_sum.to(dtype).to(tl.float32), up_sum.to(dtype).to(tl.float32)
    out = activate(gate_sum, up_sum, dtype, GELU)
    tl.store(out_ptr + assignment * OUTPUTS + column, out, column < OUTPUTS)


@dispatched
@triton.jit(do_not_specialize=["held", "experts"])
def _few_down_kernel(
    x_ptr, weight_ptr, experts_ptr, weights_ptr, out_ptr, scale_ptr, held, experts,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, TOP_K: tl.constexpr, PLACES: tl.constexpr,
    FP8: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``COLUMNS`` outputs of one token, summed over its experts.

    The experts were written two kernels before, and the one before this waited for that: so they
    may be read while it still runs, and the weights that need nothing else with them.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.program_id(1).to(tl.int64)
    place, k = tl.arange(0, PLACES), tl.arange(0, BLOCK)
    assignment = token * TOP_K + place
    known = place < TOP_K
    expert = tl.load(experts_ptr + assignment, known, -1, cache_modifier=".cg").to(tl.int64) - held
    dtype = out_ptr.dtype.element_ty
    scale = tl.load(weights_ptr + assignment, known, 0.0, cache_modifier=".cg")
    scale = scale.to(dtype).to(tl.float32)
    real = known & (expert >= 0) & (expert < experts)
    here = real[:, None, None] & (column < OUTPUTS)[None, :, None]
    places = ((expert * OUTPUTS)[:, None] + column[None, :])[:, :, None] * INPUTS
    inside = here & (k < INPUTS)[None, None, :]
    weight = tl.load(weight_ptr + places + k[None, None, :], inside, 0.0)
    if FP8:
        of_outputs = (expert * OUTPUTS)[:, None] + column[None, :]
        known_outputs = real[:, None] & (column < OUTPUTS)[None, :]
        of_outputs = tl.load(scale_ptr + of_outputs, known_outputs, 0.0)
    if _OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x_ptrs = x_ptr + assignment[:, None] * INPUTS + k[None, :]
    x = tl.load(x_ptrs, real[:, None] & (k < INPUTS)[None, :], 0.0).to(tl.float32)
    if FP8:
        most = tl.max(tl.abs(x), axis=1)
        for first in tl.static_range(BLOCK, INPUTS, BLOCK):
            mask = real[:, None] & (first + k < INPUTS)[None, :]
            more = tl.load(x_ptrs + first, mask, 0.0).to(tl.float32)
            most = tl.maximum(most, tl.max(tl.abs(more), axis=1))
        factor, x_scale = factor_and_scale(most)
        x = to_fp8(x * factor[:, None]).to(tl.float32)
    else:
        x *= scale[:, None]
    total = weight.to(tl.float32) * x[:, None, :]
    for first in tl.static_range(BLOCK, INPUTS, BLOCK):
        inner = first + k
        inside = here & (inner < INPUTS)[None, None, :]
        weight = tl.load(weight_ptr + places + inner[None, None, :], inside, 0.0)
        mask = real[:, None] & (inner < INPUTS)[None, :]
        x = tl.load(x_ptrs + first, mask, 0.0).to(tl.float32)
        if FP8:
            x = to_fp8(x * factor[:, None]).to(tl.float32)
        else:
            x *= scale[:, None]
        total += weight.to(tl.float32) * x[:, None, :]
    parts = tl.sum(total, axis=2)
    if FP8:
        parts *= of_outputs * (x_scale * scale)[:, None]
    sums = tl.sum(parts, axis=0)
    tl.store(out_ptr + token * OUTPUTS + column, sums.to(dtype), column < OUTPUTS)
