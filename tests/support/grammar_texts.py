"""Random texts of a compiled grammar, token by token, as a sampling model would write them."""

from random import Random

import numpy as np

from minisgl.structured import CompiledGrammar, mask_words


def allowed_tokens(grammar_mask: np.ndarray, vocab_size: int) -> list[int]:
    """Return the tokens of a mask."""
    bits = np.unpackbits(grammar_mask.view(np.uint8), bitorder="little")[:vocab_size]
    return bits.nonzero()[0].tolist()


def random_tokens(
    grammar: CompiledGrammar,
    vocab_size: int,
    eos: frozenset[int],
    random: Random,
    *,
    most: int,
    closing: frozenset[int] = frozenset(),
) -> list[int] | None:
    """Return the tokens of a random text without its end; ``None`` if it has more than ``most``.

    Args:
        grammar: what it must match.
        vocab_size: of the model.
        eos: tokens that end it.
        random: chooses.
        most: longest text.
        closing: tokens that are preferred, so that texts come to an end.
    """
    matcher, mask = grammar.matcher(), np.zeros(mask_words(vocab_size), dtype=np.int32)
    tokens: list[int] = []
    while len(tokens) <= most:
        mask[:] = -1  # what was there must not matter
        matcher.fill_mask(mask)
        may = allowed_tokens(mask, vocab_size)
        assert may, f"a dead end after {tokens}"
        ends, goes_on = [t for t in may if t in eos], [t for t in may if t not in eos]
        if ends and (not goes_on or random.random() < 0.5):
            assert matcher.accept(ends[0])
            return tokens
        preferred = [token for token in goes_on if token in closing]
        token = random.choice(preferred if preferred and random.random() < 0.6 else goes_on)
        assert matcher.accept(token)
        tokens.append(token)
    return None
