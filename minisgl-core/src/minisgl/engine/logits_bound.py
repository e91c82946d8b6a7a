"""How many logits of prompt tokens a step computes; plain numbers, without torch."""

from typing import Final

_SCORED: Final = 1 << 25
"""Logits of prompt tokens that one step computes, where they are asked for: 128 MiB in float32."""


def max_scored_tokens(vocab_size: int, page_size: int) -> int:
    """Return the most prompt tokens with log-probabilities in one step, at least a page."""
    return max(_SCORED // vocab_size, page_size)
