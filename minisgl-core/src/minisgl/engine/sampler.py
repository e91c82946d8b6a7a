"""Chooses the sampling operation that a launch's rows need."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from minisgl.kernel.ops import OpTable


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTensors:
    """Parameters of the sampled rows of one launch, each ``[S]`` on the logits' device.

    Attributes:
        temperature: float32; 0 is greedy.
        top_k: int64; 0 is all.
        top_p, min_p: float32; 1 and 0 filter nothing.
        seed: int64.
        positions: int64: place of the token to come in its sequence.
        all_greedy: every row is greedy.
        filtered: bool, on the host: rows that use top_k, top_p or min_p.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    positions: torch.Tensor
    all_greedy: bool
    filtered: npt.NDArray[np.bool_]


def sample(logits: torch.Tensor, params: SamplingTensors, ops: OpTable) -> torch.Tensor:
    """Return the next tokens, int64 ``[S]``, for logits ``[S, vocab]``.

    Greedy rows are the argmax (the lowest token id among equals) whatever the other rows do.
    """
    p = params
    if p.all_greedy or not p.filtered.any():
        return ops.sample_gumbel(logits, p.temperature, p.seed, p.positions)
    return ops.sample_filtered(
        logits, p.temperature, p.top_k, p.top_p, p.min_p, p.seed, p.positions
    )
