"""Penalties in one pass: each logit and count is read once, each logit written once.

The grid depends on the number of rows and on the vocabulary alone.
"""

import torch
import triton
import triton.language as tl

from minisgl.kernel.controls import ControlTensors, check_counts
from minisgl.kernel.triton.dispatch import dispatched
from minisgl.kernel.triton.launch import OVERLAP, factors, wait_for_inputs

_BLOCK, _NUM_WARPS = 4096, 4


def penalize(logits: torch.Tensor, rows: torch.Tensor, state: ControlTensors) -> None:
    """Lower the logits of tokens that are there already, float32; see ``Penalize``."""
    check_counts(logits, state)
    assert logits.stride(-1) == state.counts.stride(-1) == 1
    assert rows.is_contiguous()
    vocab_size = logits.shape[-1]
    _penalize_kernel[(rows.shape[0], -(-vocab_size // _BLOCK))](
        logits, rows, state.counts, state.presence, state.frequency, state.repetition,
        *factors(logits.stride(0)), *factors(state.counts.stride(0)), vocab_size, _BLOCK,
        num_warps=_NUM_WARPS, launch_pdl=OVERLAP,
    )  # fmt: skip


@dispatched
@triton.jit(do_not_specialize=["logits_stride", "counts_stride"])
def _penalize_kernel(
    logits_ptr,
    rows_ptr,
    counts_ptr,
    presence_ptr,
    frequency_ptr,
    repetition_ptr,
    logits_stride,
    logits_unit: tl.constexpr,
    counts_stride,
    counts_unit: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """``BLOCK`` tokens of one row."""
    wait_for_inputs()
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + place)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    repetition = tl.load(repetition_ptr + row)
    tokens = part * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < VOCAB
    at = logits_ptr + place * logits_stride * logits_unit + tokens
    logits = tl.load(at, mask=inside, other=0.0)
    of_row = counts_ptr + row * counts_stride * counts_unit
    counts = tl.load(of_row + tokens, mask=inside, other=0)
    repeated = tl.where(logits > 0, logits / repetition, logits * repetition)
    logits = tl.where(counts != 0, repeated, logits)
    in_output = (counts >> 1).to(tl.float32)
    logits -= in_output * frequency
    logits -= tl.where(in_output > 0, presence, 0.0)
    tl.store(at, logits, mask=inside)
