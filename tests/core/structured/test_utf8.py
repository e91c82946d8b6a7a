"""The guard of UTF-8: what may not follow a token that ends within a character."""

import contextlib

import numpy as np
import pytest

from minisgl.structured import mask_words
from minisgl.structured.utf8 import INVALID, Utf8Guard
from support.grammar_texts import allowed_tokens

VOCABULARY = [bytes((i,)) for i in range(256)]
VOCABULARY += [
    b"",
    b"\xa0\x80",
    b"\x9f\xbf!",
    "aé".encode(),
    b"a\xed",
    b"\xb7\xf4",
    b"\x90\x80\x80b",
]
VOCAB_SIZE = len(VOCABULARY) + 40
"""Models pad their vocabulary."""


def refused_after(text: bytes) -> set[bytes]:
    """Tokens that may not follow ``text``, a token."""
    guard = Utf8Guard(VOCABULARY, VOCAB_SIZE)
    mask = np.full(mask_words(VOCAB_SIZE), -1, dtype=np.int32)
    pending = guard.pending(VOCABULARY.index(text))
    if pending is not None:
        guard.restrict(mask, pending)
    allowed = set(allowed_tokens(mask, VOCAB_SIZE))
    assert set(range(len(VOCABULARY), VOCAB_SIZE)) <= allowed, "padding is not its business"
    return {token for i, token in enumerate(VOCABULARY) if i not in allowed}


def begins_a_character(text: bytes) -> bool:
    """Whether Python's decoder takes ``text`` with some bytes behind it for one character."""
    for num_more in range(3):
        with contextlib.suppress(UnicodeDecodeError):
            return len((text + b"\x80" * num_more).decode()) == 1
    return False


@pytest.mark.parametrize("text", VOCABULARY, ids=bytes.hex)
def test_a_token_may_not_go_on_with_a_byte_that_makes_no_character(text: bytes) -> None:
    """Only the second bytes that depend on the first: XGrammar has the others right."""
    lead = text[-1:]
    restricts = lead in {b"\xe0", b"\xed", b"\xf0", b"\xf4"}
    assert refused_after(text) == {
        token
        for token in VOCABULARY
        if restricts and b"\x80" <= token[:1] < b"\xc0" and not begins_a_character(lead + token[:1])
    }


@pytest.mark.parametrize(
    ("token", "invalid"),
    [
        (b"\xed\xa0\x80", True), (b"a\xe0\x80", True), (b"\xf4\x90", True), (b"\xf0\x8fb", True),
        (b"\xed\x9f\xbf", False), (b"\xee\x80\x80", False), (b"\x80\xed", False),
        ("é🎉".encode(), False),
        (b"\xe0\xa0\x80", False), (b"\xa0\x80", False), (b"\xf4\x8f\xbf\xbf", False),
    ],
)  # fmt: skip
def test_tokens_that_hold_them_are_found(token: bytes, invalid: bool) -> None:
    assert bool(INVALID.search(token)) == invalid
