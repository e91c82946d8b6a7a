"""Torch reference of the masks that a host makes for some rows: see ``MaskTokens``."""

import torch


def mask_tokens(
    logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor, which: torch.Tensor
) -> None:
    """Set the logits of tokens that may not come to -inf; see ``MaskTokens``."""
    check_words(logits, masks)
    check_pairs(places, which)
    vocab_size = logits.shape[-1]
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    bits = (masks[which].unsqueeze(-1) >> shifts) & 1
    forbidden = bits.flatten(1)[:, :vocab_size] == 0
    logits[places] = logits[places].masked_fill(forbidden, float("-inf"))


def check_words(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """Refuse masks with too few words: the next one's would be read for the last tokens.

    Raises:
        ValueError: they have.
    """
    words, vocab_size = masks.shape[-1], logits.shape[-1]
    if words * 32 < vocab_size:
        raise ValueError(
            f"masks of {words} words hold {words * 32} tokens, but the logits have {vocab_size}: "
            f"a mask must have {-(-vocab_size // 32)} words"
        )


def check_pairs(places: torch.Tensor, which: torch.Tensor) -> None:
    """Refuse rows without a mask, and masks without a row.

    Raises:
        ValueError: there are some.
    """
    if places.shape != which.shape:
        raise ValueError(f"{len(places)} rows are to be masked, with {len(which)} masks named")
