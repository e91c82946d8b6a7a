"""Products of sorted rows with the weights of their experts, and the sum over a token's experts.

One program makes one tile of rows times one tile of outputs. Few rows wait for the weights alone:
then the weights are the first operand (``swapped``), as Hopper's tensor cores take 64 rows of the
first and as few as 8 of the second. Programs of one expert's tiles follow one another, so that its
weights come from the L2 cache all but once.

With weights in fp8 the rows are quantized before, and sums are multiplied with both scales.
Hopper's tensor cores add up products of fp8 with 14 bits or so (DeepSeek-V3's report, 3.3.2): after
the inputs of a tile such a sum is added to one in float32.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from minisgl.kernel.triton.activations import activate
from minisgl.kernel.triton.dispatch import dispatched
from minisgl.kernel.triton.launch import OVERLAP, multiply_add, wait_for_inputs
from minisgl_moe_triton.configs import Tile
from minisgl_moe_triton.kernels.quantize import Fp8Product
from minisgl_moe_triton.kernels.routing import Routed, Tiles

_SUMMED = 1024

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def gate_up(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tiles: Tiles,
    top_k: int,
    tile: Tile,
    *,
    gelu: bool,
    fp8: Fp8Product | None = None,
) -> torch.Tensor:
    """Return ``act(gate) * up`` of each row, ``[T * top_k, inner]``, in sorted order.

    Args:
        hidden: ``[T, hidden]``, contiguous.
        weight: ``[E, 2 * inner, hidden]``, gate rows first.
        tiles: the rows.
        top_k: experts a token.
        tile: how the product is cut.
        gelu: the activation; else SiLU.
        fp8: of operands in fp8.
    """
    outputs, inputs = weight.shape[1] // 2, weight.shape[2]
    dtype, *scales = _result_of(hidden, fp8)
    out = torch.empty((len(tiles.order), outputs), dtype=dtype, device=hidden.device)
    grid = (tiles.most * -(-outputs // tile.outputs),)
    tma = tile.tma and _can_copy(inputs, weight)
    source = _descriptor(weight, inputs, tile.outputs, tile.inputs) if tma else weight
    _grouped_kernel[grid](
        hidden, source, out, tiles.order, tiles.tiles, hidden, *scales, outputs, inputs, top_k,
        True, gelu, fp8 is not None, tile.swapped, tma, tiles.rows, tile.outputs, tile.inputs,
        tile.group,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=OVERLAP,
    )  # fmt: skip
    return out


def down(
    rows: torch.Tensor,
    weight: torch.Tensor,
    weights: torch.Tensor,
    tiles: Tiles,
    tile: Tile,
    *,
    fp8: Fp8Product | None = None,
) -> torch.Tensor:
    """Return each assignment's weighted part, ``[T * top_k, hidden]``, by assignment.

    Args:
        rows: ``[T * top_k, inner]``, sorted.
        weight: ``[E, hidden, inner]``.
        weights: float32 ``[T, top_k]``, of the router.
        tiles: the rows.
        tile: how the product is cut.
        fp8: of operands in fp8.
    """
    outputs, inputs = weight.shape[1], weight.shape[2]
    dtype, *scales = _result_of(rows, fp8)
    out = torch.empty((len(rows), outputs), dtype=dtype, device=rows.device)
    grid = (tiles.most * -(-outputs // tile.outputs),)
    tma = tile.tma and _can_copy(inputs, weight, rows)
    source = _descriptor(weight, inputs, tile.outputs, tile.inputs) if tma else weight
    x = _descriptor(rows, inputs, tiles.rows, tile.inputs) if tma else rows
    _grouped_kernel[grid](
        x, source, out, tiles.order, tiles.tiles, weights, *scales, outputs, inputs, 1,
        False, False, fp8 is not None, tile.swapped, tma, tiles.rows, tile.outputs, tile.inputs,
        tile.group,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=OVERLAP,
    )  # fmt: skip
    return out


def _result_of(
    rows: torch.Tensor, fp8: Fp8Product | None
) -> tuple[torch.dtype, torch.Tensor, torch.Tensor]:
    """Return the dtype of a product, and scales of rows and outputs, or what stands for them."""
    if fp8 is None:
        return rows.dtype, rows, rows
    return fp8.dtype, fp8.rows, fp8.outputs


def _can_copy(inputs: int, *tensors: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator takes these: it copies from multiples of 16 bytes."""
    return all(
        inputs * tensor.itemsize % 16 == 0 and tensor.data_ptr() % 16 == 0 for tensor in tensors
    )


def _descriptor(tensor: torch.Tensor, inputs: int, rows: int, columns: int) -> TensorDescriptor:
    """Describe ``tensor`` as rows of ``inputs``, of which a kernel loads ``[rows, columns]``."""
    shape = [tensor.numel() // inputs, inputs]
    return TensorDescriptor(tensor, shape, [inputs, 1], [rows, columns])


def sum_parts(parts: torch.Tensor, routed: Routed, num_experts: int) -> torch.Tensor:
    """Return the sum ``[T, hidden]`` of each token's ``parts`` ``[T * top_k, hidden]``.

    Parts of experts that are not held were never written, and count as zero.
    """
    (tokens, top_k), hidden = routed.experts.shape, parts.shape[1]
    out = torch.empty((tokens, hidden), dtype=parts.dtype, device=parts.device)
    block = min(_SUMMED, triton.next_power_of_2(hidden))
    _sum_kernel[(tokens, -(-hidden // block))](
        parts, routed.experts, out, routed.first, num_experts, hidden, top_k,
        triton.next_power_of_2(top_k), block, num_warps=4, launch_pdl=OVERLAP,
    )  # fmt: skip
    return out


@dispatched
@triton.jit
def _grouped_kernel(
    x_ptr, weight_ptr, out_ptr, order_ptr, tiles_ptr, weights_ptr,  # the first two may be TMA's
    x_scale_ptr, scale_ptr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
    GELU: tl.constexpr, FP8: tl.constexpr, SWAPPED: tl.constexpr, TMA: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_OUTPUTS: tl.constexpr, TILE_INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """One tile. ``GATED``: rows are gathered from tokens; else, they are scattered to parts."""
    # Not after fetching weights into the L2 cache: layers were slower with that, by up to 9 %.
    wait_for_inputs()
    num_tiles = tl.load(tiles_ptr)
    columns: tl.constexpr = (OUTPUTS + TILE_OUTPUTS - 1) // TILE_OUTPUTS
    pid = tl.program_id(0)
    tile, place = _tile_and_column(pid, num_tiles, columns, GROUP)
    # Loaded before it is known whether there is such a tile: one wait less.
    tile_ptr = tiles_ptr + 1 + 3 * tile
    expert = tl.load(tile_ptr)
    first_row = tl.load(tile_ptr + 1)
    end = tl.load(tile_ptr + 2)
    if pid >= num_tiles * columns:
        return
    row = first_row + tl.arange(0, TILE_ROWS)
    real = row < end
    column = place * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    assignment = tl.load(order_ptr + row, real, 0)
    source = (assignment // TOP_K if GATED else row).to(tl.int64)
    # What is behind the last output is computed from anything, and not stored.
    known = column if OUTPUTS % TILE_OUTPUTS == 0 else tl.minimum(column, OUTPUTS - 1)
    halves: tl.constexpr = 2 if GATED else 1
    above = expert * (halves * OUTPUTS)  # of the expert in its stack, in rows
    k = tl.arange(0, TILE_INPUTS)
    if GATED or not TMA:
        x_ptrs = x_ptr + source[:, None] * INPUTS + k[None, :]
    if not TMA:
        weight_ptrs = weight_ptr + (above + known).to(tl.int64)[:, None] * INPUTS + k[None, :]
    result = tl.zeros(
        (TILE_OUTPUTS, TILE_ROWS) if SWAPPED else (TILE_ROWS, TILE_OUTPUTS), tl.float32
    )
    up = result
    for first in range(0, INPUTS, TILE_INPUTS):
        # Weights first: they need nothing that is still to come.
        if TMA:
            weight = weight_ptr.load([above + place * TILE_OUTPUTS, first])
        else:
            weight = _load_weight(weight_ptrs + first, k, first, INPUTS, TILE_INPUTS)
        if GATED:
            if TMA:
                up_weight = weight_ptr.load([above + OUTPUTS + place * TILE_OUTPUTS, first])
            else:
                ups = weight_ptrs + OUTPUTS * INPUTS + first
                up_weight = _load_weight(ups, k, first, INPUTS, TILE_INPUTS)
        if TMA and not GATED:
            x = x_ptr.load([first_row, first])
        else:
            x = _load_rows(x_ptrs + first, real, k, first, INPUTS, TILE_INPUTS)
        result = _multiply_add(weight, x, result, SWAPPED, FP8)
        if GATED:
            up = _multiply_add(up_weight, x, up, SWAPPED, FP8)
    if FP8:
        x_scale, scale_ptrs = tl.load(x_scale_ptr + source, real, 0.0), scale_ptr + above + known
        result *= _outer(tl.load(scale_ptrs), x_scale, SWAPPED)
        if GATED:
            up *= _outer(tl.load(scale_ptrs + OUTPUTS), x_scale, SWAPPED)
    dtype = out_ptr.dtype.element_ty
    if GATED:
        gate = result.to(dtype).to(tl.float32)
        result = activate(gate, up.to(dtype).to(tl.float32), dtype, GELU)
    else:
        scale = tl.load(weights_ptr + assignment, real, 0.0).to(dtype).to(tl.float32)
        result *= scale[None, :] if SWAPPED else scale[:, None]
    target = (row if GATED else assignment).to(tl.int64) * OUTPUTS
    _store_tile(out_ptr, result.to(dtype), target, real, column, column < OUTPUTS, SWAPPED)


@triton.jit
def _tile_and_column(pid, num_tiles, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Return which tile of rows and which of outputs: of ``GROUP`` tiles all, then the next.

    A program beyond the last tile gets any that there is room for.
    """
    if GROUP == 1:
        return pid // COLUMNS, pid % COLUMNS
    group = pid // (GROUP * COLUMNS) * GROUP
    size = tl.maximum(tl.minimum(num_tiles - group, GROUP), 1)
    inner = pid % (GROUP * COLUMNS)
    return group + inner % size, inner // size


@triton.jit
def _load_weight(ptrs, k, first, INPUTS: tl.constexpr, TILE_INPUTS: tl.constexpr):
    if INPUTS % TILE_INPUTS == 0:
        return tl.load(ptrs)
    else:  # noqa: RET505 - only one of the two is compiled
        return tl.load(ptrs, (k < INPUTS - first)[None, :], 0.0)


@triton.jit
def _load_rows(ptrs, real, k, first, INPUTS: tl.constexpr, TILE_INPUTS: tl.constexpr):
    if INPUTS % TILE_INPUTS == 0:
        return tl.load(ptrs, real[:, None], 0.0)
    else:  # noqa: RET505
        return tl.load(ptrs, real[:, None] & (k < INPUTS - first)[None, :], 0.0)


@triton.jit
def _multiply_add(weight, x, total, SWAPPED: tl.constexpr, FP8: tl.constexpr):
    first, second = (weight, x) if SWAPPED else (x, weight)
    if FP8 and not _INTERPRETED:
        # Not by max_num_imprecise_acc: of two products in flight, gate and up, Triton 3.6 waits
        # for the first alone before it adds up both.
        return total + tl.dot(first, tl.trans(second))
    else:  # noqa: RET505
        return multiply_add(first, tl.trans(second), total)


@triton.jit
def _store_tile(out_ptr, result, target, real, column, inside, SWAPPED: tl.constexpr):
    if SWAPPED:
        mask = real[None, :] & inside[:, None]
        tl.store(out_ptr + target[None, :] + column[:, None], result, mask)
    else:
        mask = real[:, None] & inside[None, :]
        tl.store(out_ptr + target[:, None] + column[None, :], result, mask)


@triton.jit
def _outer(outputs, rows, SWAPPED: tl.constexpr):
    if SWAPPED:
        return outputs[:, None] * rows[None, :]
    else:  # noqa: RET505
        return rows[:, None] * outputs[None, :]


@dispatched
@triton.jit(do_not_specialize=["held", "experts"])
def _sum_kernel(
    parts_ptr, experts_ptr, out_ptr, held, experts,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, PLACES)
    inside = column < HIDDEN
    wait_for_inputs()
    known = place < TOP_K
    expert = tl.load(experts_ptr + token * TOP_K + place, known, -1) - held
    chosen = known & (expert >= 0) & (expert < experts)
    ptrs = parts_ptr + (token * TOP_K + place)[:, None] * HIDDEN + column[None, :]
    parts = tl.load(ptrs, chosen[:, None] & inside[None, :], 0.0).to(tl.float32)
    tl.store(
        out_ptr + token * HIDDEN + column,
        tl.sum(parts, axis=0).to(out_ptr.dtype.element_ty),
        inside,
    )
