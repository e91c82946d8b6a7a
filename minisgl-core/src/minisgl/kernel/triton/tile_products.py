"""Products of a few to some dozen rows, cut into more tiles than cuBLAS makes of them.

With so few rows a product is as quick as the memory gives its weights, if every multiprocessor
reads: tiles are narrow, and the inputs are cut into parts where outputs alone are too few. A norm
adds the parts up (``add_rms_norm``). The kernel overlaps with its neighbours, which cuBLAS's do
not, and may end with the gated activation.

Measured on an H200: microseconds of the products, norms and activation of one layer, cuBLAS 13.0
with kernels of their own beside these, inside a CUDA graph:

| rows | Qwen3-0.6B    | Qwen3-4B      | Qwen3-14B    |
|------|---------------|---------------|--------------|
| 2    | 22.7 and 19.7 | 73.0 and 63.8 | 184 and 257  |
| 8    | 29.5 and 19.9 | 74.2 and 64.6 | 186 and 249  |
| 16   | 29.6 and 20.2 | 75.0 and 65.4 | 185 and 253  |
| 32   | 30.6 and 22.6 | 76.4 and 84.1 | 186 and 223  |
| 64   | 31.4 and 23.1 | 78.4 and 80.5 | 194 and 216  |
| 128  | 33.0 and 28.1 | 81.9 and 122  | 204 and 357  |

So large weights are cuBLAS's, and where rows make work of it, all but small ones.

Compiled per sizes and dtype, and for tiles of 16 or of 64 rows, one or two of them.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from minisgl.kernel.triton.activations import activate
from minisgl.kernel.triton.dispatch import dispatched
from minisgl.kernel.triton.launch import OVERLAP, factors, multiply_add, wait_for_inputs

_MOST_WEIGHTS = ((16, 2**26), (64, 2**23), (128, 2**23))
"""By rows: the largest weight, in elements, for which this kernel is taken."""

_MOST_ROWS_OF_PLAIN_PRODUCTS = 64
"""Beyond, only products that save something else: a sum of parts, an activation."""

_PROGRAMS = 160
"""Parts are cut until there would be more programs than this: about one for each multiprocessor."""

_LEAST_OF_A_PART = 512
"""Inputs of a part: below, its sum costs more than it saves."""

_GELU = tl.constexpr(2)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut: rows, outputs and inputs of a tile, parts, pipeline stages, warps."""

    rows: int
    outputs: int
    inputs: int
    parts: int
    stages: int
    warps: int


@lru_cache
def choose_tiling(
    rows: int, outputs: int, inputs: int, *, gated: bool, parts: bool
) -> Tiling | None:
    """Return how to cut, or ``None`` where this kernel does not fit or cuBLAS is quicker.

    Args:
        rows: of the input.
        outputs: of the weight; with ``gated``, half of them.
        inputs: of the weight.
        gated: two products at once.
        parts: whether the result may come in parts.
    """
    tile_rows, tile_outputs, tile_inputs = (16 if rows <= 16 else 64), 32, 128
    if outputs % tile_outputs or inputs % tile_inputs:
        return None
    size = outputs * inputs * (1 + gated)
    most = next((size for upto, size in _MOST_WEIGHTS if rows <= upto), 0)
    if size > most or (rows > _MOST_ROWS_OF_PLAIN_PRODUCTS and not (parts or gated)):
        return None
    programs = -(-rows // tile_rows) * (outputs // tile_outputs)
    count = 1
    if parts:
        count = max(
            count
            for count in (1, 2, 3, 4, 6, 8)
            if count == 1
            or (
                inputs % (count * tile_inputs) == 0
                and inputs // count >= _LEAST_OF_A_PART
                and programs * count <= _PROGRAMS
            )
        )
    return Tiling(tile_rows, tile_outputs, tile_inputs, count, 3 if gated else 4, 4)


def tile_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiling: Tiling,
    gelu: bool | None = None,
) -> torch.Tensor:
    """Return the parts ``[S, T, out]`` of ``x @ weight.T + bias``; float32 if they are several.

    Unless ``gelu`` is ``None``: ``act(gate) * up`` of the two halves, ``[1, T, out / 2]``.
    ``x`` is ``[T, in]`` with contiguous elements.
    """
    rows, inputs = x.shape
    gate = 0 if gelu is None else 1 + gelu
    outputs = weight.shape[0] // (2 if gate else 1)
    dtype = x.dtype if tiling.parts == 1 else torch.float32
    out = torch.empty((tiling.parts, rows, outputs), dtype=dtype, device=x.device)
    grid = (-(-rows // tiling.rows), outputs // tiling.outputs, tiling.parts)
    _tile_kernel[grid](
        x, *factors(x.stride(0)), weight, weight if bias is None else bias, out, rows,
        outputs, inputs, inputs // tiling.parts, bias is not None, gate,
        tiling.rows, tiling.outputs, tiling.inputs,
        num_stages=tiling.stages, num_warps=tiling.warps, launch_pdl=OVERLAP,
    )  # fmt: skip
    return out


@dispatched
@triton.jit(do_not_specialize=["x_stride", "bias_ptr", "rows"])
def _tile_kernel(
    x_ptr, x_stride, X_FACTOR: tl.constexpr, weight_ptr, bias_ptr, out_ptr, rows,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PART: tl.constexpr, BIASED: tl.constexpr,
    GATE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """One tile of one part."""
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    part = tl.program_id(2)
    k = part * PART + tl.arange(0, TILE_INPUTS)
    inside = (row < rows)[:, None]
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * (x_stride * X_FACTOR) + k[None, :]
    weight_ptrs = weight_ptr + column.to(tl.int64)[None, :] * INPUTS + k[:, None]
    result = tl.zeros((TILE_ROWS, TILE_OUTPUTS), tl.float32)
    up = tl.zeros((TILE_ROWS, TILE_OUTPUTS), tl.float32)
    wait_for_inputs()
    for _ in range(0, PART, TILE_INPUTS):
        x = tl.load(x_ptrs, inside, 0.0)
        result = multiply_add(x, tl.load(weight_ptrs), result)
        if GATE:
            up = multiply_add(x, tl.load(weight_ptrs + OUTPUTS * INPUTS), up)
        x_ptrs += TILE_INPUTS
        weight_ptrs += TILE_INPUTS
    if BIASED:
        first = (part == 0).to(tl.float32)
        result += (tl.load(bias_ptr + column).to(tl.float32) * first)[None, :]
        if GATE:
            up += tl.load(bias_ptr + OUTPUTS + column).to(tl.float32)[None, :]
    dtype = out_ptr.dtype.element_ty
    if GATE:
        gate = result.to(dtype).to(tl.float32)
        result = activate(gate, up.to(dtype).to(tl.float32), dtype, GATE == _GELU)
    place = (part * rows + row).to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    tl.store(out_ptr + place, result.to(dtype), inside)
