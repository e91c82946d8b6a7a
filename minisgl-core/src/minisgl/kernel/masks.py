"""Torch reference of the masks that a host makes for some rows: see ``MaskTokens``."""

import torch


def mask_tokens(
    logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor, which: torch.Tensor
) -> None:
    """Set the logits of tokens that may not come to -inf; see ``MaskTokens``."""
    vocab_size = logits.shape[-1]
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    bits = (masks[which].unsqueeze(-1) >> shifts) & 1
    forbidden = bits.flatten(1)[:, :vocab_size] == 0
    logits[places] = logits[places].masked_fill(forbidden, float("-inf"))
