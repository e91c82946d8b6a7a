"""Checks of single products of experts in fp8, against float64 of the same quantized values."""

import torch
import torch.nn.functional as F  # noqa: N812

from minisgl.moe import dequantize_rows, quantize_rows, quantize_stack
from minisgl.testing.moe_contract import Sizes
from minisgl_moe_triton.configs import Grouped
from minisgl_moe_triton.kernels.grouped import down, gate_up
from minisgl_moe_triton.kernels.quantize import operand
from minisgl_moe_triton.kernels.routing import Routed, route, sort_by_expert


def check_products(
    device: str, dtype: torch.dtype, size: Sizes, tokens: int, launch: Grouped, most: float
) -> None:
    """Compare the rows of either product: nothing is quantized between it and the comparison.

    Args:
        device, dtype: of tokens and results.
        size: of the layer.
        tokens: of the launch.
        launch: how the products are cut.
        most: relative error, in norm, of a row.
    """
    random = torch.Generator(device).manual_seed(tokens)

    def randn(*shape: int) -> torch.Tensor:
        empty = torch.empty(shape, dtype=dtype, device=device)
        return empty.normal_(std=shape[-1] ** -0.5, generator=random)

    first, of_first = quantize_stack(randn(size.experts, 2 * size.inner, size.hidden))
    second, of_second = quantize_stack(randn(size.experts, size.hidden, size.inner))
    hidden = randn(tokens, size.hidden) * size.hidden**0.5
    logits = randn(tokens, size.experts) * size.experts**0.5
    weights, chosen = route(logits, size.top_k, renormalize=True)
    tiles = sort_by_expert(Routed(chosen, weights), size.experts, launch.rows)
    x, product = operand(hidden, of_first)
    rows = gate_up(x, first, tiles, size.top_k, launch.gate_up, gelu=False, fp8=product)
    y, product = operand(rows, of_second)
    parts = down(y, second, weights, tiles, launch.down, fp8=product)

    order = tiles.order.long()
    experts = chosen.flatten().long()[order]
    tokens_of = exactly(hidden)[order // size.top_k]
    rows_of = exactly(rows)
    for expert in experts.unique().tolist():
        mine = experts == expert
        gate, up = F.linear(tokens_of[mine], undone(first, of_first, expert)).chunk(2, dim=1)
        gate, up = gate.to(dtype).double(), up.to(dtype).double()
        compare(rows[mine], F.silu(gate).to(dtype).double() * up, most)
        share = weights.flatten()[order[mine]].to(dtype).double()[:, None]
        compare(
            parts[order[mine]], F.linear(rows_of[mine], undone(second, of_second, expert)) * share,
            most,
        )  # fmt: skip


def exactly(rows: torch.Tensor) -> torch.Tensor:
    """Return what the quantized rows stand for, in float64."""
    values, scales = quantize_rows(rows)
    return values.float().double() * scales.double()[:, None]


def undone(stack: torch.Tensor, scales: torch.Tensor, expert: int) -> torch.Tensor:
    return dequantize_rows(stack[expert], scales[expert]).double()


def compare(found: torch.Tensor, expected: torch.Tensor, most: float) -> None:
    error = (found.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) < most, f"a row is off by {float(error.max()):.2e}"
