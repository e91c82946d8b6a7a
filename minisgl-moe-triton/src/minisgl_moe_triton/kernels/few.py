"""Few tokens: each assignment by itself, without sorting, as fast as the memory gives its weights.

Two experts that several tokens share are read once for each of them, so this pays only as long as
that is rare. The second product sums over a token's experts itself.
"""

import torch
import triton
import triton.language as tl

from minisgl.kernel.triton.activations import activate
from minisgl.kernel.triton.dispatch import dispatched
from minisgl.kernel.triton.launch import OVERLAP, wait_for_inputs
from minisgl_moe_triton.configs import Columns
from minisgl_moe_triton.kernels.routing import Routed

_OVERLAP = tl.constexpr(OVERLAP)


def few_gate_up(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    routed: Routed,
    columns: Columns,
    *,
    gelu: bool,
) -> torch.Tensor:
    """Return ``act(gate) * up`` of each assignment, ``[T * top_k, inner]``.

    Args:
        hidden: ``[T, hidden]``, contiguous.
        weight: ``[E, 2 * inner, hidden]``, gate rows first.
        routed: experts of each token.
        columns: outputs of a program.
        gelu: the activation; else SiLU.
    """
    outputs, inputs = weight.shape[1] // 2, weight.shape[2]
    num, top_k = routed.experts.numel(), routed.experts.shape[1]
    out = torch.empty((num, outputs), dtype=hidden.dtype, device=hidden.device)
    block = min(columns.inputs, triton.next_power_of_2(inputs))
    _few_gate_up_kernel[(-(-outputs // columns.outputs), num)](
        hidden, weight, routed.experts, out, routed.first, len(weight), outputs, inputs, top_k,
        gelu, columns.outputs, block, num_warps=columns.warps, launch_pdl=OVERLAP,
    )  # fmt: skip
    return out


def few_down(
    rows: torch.Tensor, weight: torch.Tensor, routed: Routed, columns: Columns
) -> torch.Tensor:
    """Return the weighted sums ``[T, hidden]`` of ``rows`` ``[T * top_k, inner]``.

    Args:
        rows: of the first product.
        weight: ``[E, hidden, inner]``.
        routed: experts and weights of each token.
        columns: outputs of a program.
    """
    outputs, inputs = weight.shape[1], weight.shape[2]
    tokens, top_k = routed.experts.shape
    out = torch.empty((tokens, outputs), dtype=rows.dtype, device=rows.device)
    block = min(columns.inputs, triton.next_power_of_2(inputs))
    _few_down_kernel[(-(-outputs // columns.outputs), tokens)](
        rows, weight, routed.experts, routed.weights, out, routed.first, len(weight), outputs,
        inputs, top_k, triton.next_power_of_2(top_k), columns.outputs, block,
        num_warps=columns.warps, launch_pdl=OVERLAP,
    )  # fmt: skip
    return out


@dispatched
@triton.jit(do_not_specialize=["held", "experts"])
def _few_gate_up_kernel(
    x_ptr, weight_ptr, experts_ptr, out_ptr, held, experts,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, TOP_K: tl.constexpr, GELU: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
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
    gate = tl.zeros((COLUMNS, BLOCK), tl.float32)
    up = tl.zeros((COLUMNS, BLOCK), tl.float32)
    for first in tl.static_range(0, INPUTS, BLOCK):
        inner = first + k
        mask = here & (inner < INPUTS)[None, :]
        ptrs = weight_ptr + places + inner[None, :]
        gates = tl.load(ptrs, mask, 0.0).to(tl.float32)
        ups = tl.load(ptrs + OUTPUTS * INPUTS, mask, 0.0).to(tl.float32)
        x = tl.load(x_ptr + assignment // TOP_K * INPUTS + inner, inner < INPUTS, 0.0)
        x = x.to(tl.float32)[None, :]
        gate += gates * x
        up += ups * x
    dtype = out_ptr.dtype.element_ty
    gate_sum = tl.sum(gate, axis=1).to(dtype).to(tl.float32)
    up_sum = tl.sum(up, axis=1).to(dtype).to(tl.float32)
    out = activate(gate_sum, up_sum, dtype, GELU)
    tl.store(out_ptr + assignment * OUTPUTS + column, out, column < OUTPUTS)


@dispatched
@triton.jit(do_not_specialize=["held", "experts"])
def _few_down_kernel(
    x_ptr, weight_ptr, experts_ptr, weights_ptr, out_ptr, held, experts,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, TOP_K: tl.constexpr, PLACES: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
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
    if _OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x_ptrs = x_ptr + assignment[:, None] * INPUTS + k[None, :]
    x = tl.load(x_ptrs, real[:, None] & (k < INPUTS)[None, :], 0.0).to(tl.float32)
    total = weight.to(tl.float32) * (x * scale[:, None])[:, None, :]
    for first in tl.static_range(BLOCK, INPUTS, BLOCK):
        inner = first + k
        inside = here & (inner < INPUTS)[None, None, :]
        weight = tl.load(weight_ptr + places + inner[None, None, :], inside, 0.0)
        mask = real[:, None] & (inner < INPUTS)[None, :]
        x = tl.load(x_ptrs + first, mask, 0.0).to(tl.float32)
        total += weight.to(tl.float32) * (x * scale[:, None])[:, None, :]
    sums = tl.sum(tl.sum(total, axis=2), axis=0)
    tl.store(out_ptr + token * OUTPUTS + column, sums.to(dtype), column < OUTPUTS)
