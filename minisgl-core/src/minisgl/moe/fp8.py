"""Experts in fp8: how rows are quantized, and the scales that come with the stacks of weights."""

from dataclasses import dataclass
from typing import Final

import torch

FP8: Final = torch.float8_e4m3fn
"""One sign, four bits of exponent, three of mantissa: up to 448, in steps of an eighth or less."""

FP8_MOST: Final = 448.0

FP8_LEAST: Final = 2.0**-100
"""A row that is smaller still, as one of zeros, is quantized as if this were its largest value."""


@dataclass(frozen=True, slots=True)
class ExpertScales:
    """What the rows of quantized experts are to be multiplied by: one scale an output channel.

    Attributes:
        gate_up: float32, ``[num_local, 2 * intermediate_size]``.
        down: float32, ``[num_local, hidden_size]``.
    """

    gate_up: torch.Tensor
    down: torch.Tensor


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in float8_e4m3fn, ``[..., n]``, and float32 scales, ``[...]``, that undo it.

    With ``most``, the largest absolute value of a row, its scale is ``most / 448``, and its values
    are ``x * (448 / most)``, all in float32, rounded to the nearest that there is (of two, the even
    one). Weights are quantized by this, a row an output channel, and activations, a row a token.

    Args:
        rows: ``[..., n]``, of any floating dtype, ``n`` at least 1.
    """
    rows = rows.float()
    most = rows.abs().amax(dim=-1).clamp(min=FP8_LEAST)
    # With a number on either side torch multiplies by a reciprocal, here or there: rounded twice.
    largest = torch.full_like(most, FP8_MOST)
    return (rows * (largest / most).unsqueeze(-1)).to(FP8), most / largest


def quantize_stack(stack: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``quantize_rows`` of ``[E, out, in]``, expert by expert: float32 takes much room."""
    values = torch.empty(stack.shape, dtype=FP8, device=stack.device)
    scales = torch.empty(stack.shape[:-1], dtype=torch.float32, device=stack.device)
    for to, of, expert in zip(values, scales, stack, strict=True):
        quantized, scale = quantize_rows(expert)
        to.copy_(quantized)
        of.copy_(scale)
    return values, scales


def dequantize_rows(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``rows`` ``[..., n]`` times ``scale`` ``[...]`` in float32."""
    return rows.float() * scale.unsqueeze(-1)
