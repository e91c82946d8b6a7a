"""Keeps grammars from writing bytes that are no UTF-8.

XGrammar takes each character for its bytes, and lets a few pass that look like a character and are
none: halves of surrogate pairs, and characters spelt with more bytes than they need. A client would
see replacement characters, and more of them than its schema allows.
"""

import re
from collections.abc import Sequence
from typing import Final

import numpy as np

from minisgl.structured.interface import MaskArray, mask_words

_FORBIDDEN: Final = {0xE0: (0x80, 0x9F), 0xED: (0xA0, 0xBF), 0xF0: (0x80, 0x8F), 0xF4: (0x90, 0xBF)}
"""First bytes of characters, and the bytes that may follow others but not them (RFC 3629)."""

INVALID: Final = re.compile(
    b"|".join(b"%c[%c-%c]" % (lead, *bounds) for lead, bounds in _FORBIDDEN.items())
)
"""Finds them within one token."""


class Utf8Guard:
    """Which tokens may not follow one that ends within a character.

    Args:
        vocabulary: the bytes of each token.
        vocab_size: tokens of a mask.
    """

    def __init__(self, vocabulary: Sequence[bytes], vocab_size: int) -> None:
        self._last = {i: text[-1] for i, text in enumerate(vocabulary) if text[-1:] in _LEADS}
        self._kept = {lead: _mask(vocabulary, vocab_size, *of) for lead, of in _FORBIDDEN.items()}

    def pending(self, token_id: int) -> int | None:
        """Return the last byte of a token if it restricts the next token."""
        return self._last.get(token_id)

    def restrict(self, mask: MaskArray, pending: int) -> None:
        """Take the tokens out of ``mask`` that may not follow ``pending``."""
        mask &= self._kept[pending]


_LEADS: Final = frozenset(bytes((lead,)) for lead in _FORBIDDEN)


def _mask(vocabulary: Sequence[bytes], vocab_size: int, low: int, high: int) -> MaskArray:
    bits = np.ones(mask_words(vocab_size) * 32, dtype=np.uint8)
    bits[[i for i, text in enumerate(vocabulary) if text and low <= text[0] <= high]] = 0
    return np.packbits(bits, bitorder="little").view(np.int32)
