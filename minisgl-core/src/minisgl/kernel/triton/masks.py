"""Masks that a host makes for some rows: one launch reads their bits and forbids the others.

The grid depends on the number of those rows and on the vocabulary alone.
"""

import torch
import triton
import triton.language as tl

from minisgl.kernel.masks import check_pairs, check_words
from minisgl.kernel.triton.dispatch import dispatched
from minisgl.kernel.triton.launch import OVERLAP, wait_for_inputs

_BLOCK, _NUM_WARPS = 4096, 4
"""Tokens of a program: 128 words of a mask."""


def mask_tokens(
    logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor, which: torch.Tensor
) -> None:
    """Set the logits of tokens that may not come to -inf; see ``MaskTokens``."""
    check_words(logits, masks)
    check_pairs(places, which)
    assert logits.stride(-1) == masks.stride(-1) == 1
    assert places.is_contiguous()
    assert which.is_contiguous()
    vocab_size = logits.shape[-1]
    _mask_tokens_kernel[(places.shape[0], -(-vocab_size // _BLOCK))](
        logits, places, masks, which, logits.stride(0), masks.stride(0), vocab_size,
        _BLOCK, num_warps=_NUM_WARPS, launch_pdl=OVERLAP,
    )  # fmt: skip


@dispatched
@triton.jit(
    do_not_specialize=[
        "logits_ptr", "places_ptr", "masks_ptr", "which_ptr", "logits_stride", "masks_stride",
        "vocab_size",
    ]
)  # fmt: skip
def _mask_tokens_kernel(
    logits_ptr, places_ptr, masks_ptr, which_ptr, logits_stride, masks_stride, vocab_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` tokens of one row."""
    program, part = tl.program_id(0), tl.program_id(1)
    wait_for_inputs()
    place = tl.load(places_ptr + program).to(tl.int64)
    mask = tl.load(which_ptr + program).to(tl.int64)
    tokens = part * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    words = tl.load(masks_ptr + mask * masks_stride + tokens // 32, mask=inside, other=0)
    forbidden = ((words >> (tokens % 32)) & 1) == 0
    values = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    tl.store(logits_ptr + place * logits_stride + tokens, values, mask=inside & forbidden)
