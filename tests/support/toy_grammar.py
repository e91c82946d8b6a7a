"""A grammar engine without a parser: what may come next is a hash of the text so far.

Its texts are the tokens of the fake engine. So a mask that was made for any other text than the
committed one, or that reached any other row, changes tokens.
"""

from collections.abc import Callable
from zlib import crc32

import numpy as np

from minisgl.errors import RequestError
from minisgl.request import GrammarSpec, ReasoningTags
from minisgl.structured import CompiledGrammar, MaskArray
from minisgl.structured.compiler import Compilation, GrammarCompiler
from minisgl.structured.reasoning import Vocabulary

VOCAB, EOS = 11, 1


def allowed(seed: int, length: int, output: list[int]) -> set[int]:
    """Return which tokens may follow ``output``.

    From ``length`` tokens on the text may end, and at twice as many it must. A few texts are dead
    ends: nothing may follow.
    """
    if len(output) >= 2 * length:
        return {EOS}
    data = np.array([seed, *output], dtype=np.int64).tobytes()
    tokens = {t for t in range(2, VOCAB) if crc32(data + bytes([t])) % 3 == 0}
    if len(output) >= length and crc32(data) % 2:
        tokens.add(EOS)
    return tokens


def as_bits(tokens: set[int], num_words: int) -> MaskArray:
    """Return a mask."""
    flags = np.zeros(num_words * 32, dtype=np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)


class ToyMatcher:
    """Follows one text, and insists on the rules of the interface."""

    def __init__(self, seed: int, length: int) -> None:
        self._seed, self._length = seed, length
        self.output: list[int] = []

    finished = False

    def fill_mask(self, mask: MaskArray) -> None:
        mask[:] = as_bits(allowed(self._seed, self._length, self.output), len(mask))
        mask |= np.int32(-1) << VOCAB  # bits beyond the vocabulary do not matter

    def accept(self, token_id: int) -> bool:
        if token_id not in allowed(self._seed, self._length, self.output):
            return False
        self.output.append(token_id)
        return True


class ToyGrammar:
    """A compiled grammar."""

    num_bytes = 100

    def __init__(self, make: Callable[[], ToyMatcher]) -> None:
        self.matcher = make


class ToyBackend:
    """Grammars are ``seed:length``, of the kind ``grammar``."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        try:
            seed, length = map(int, spec.value.split(":"))
        except ValueError:
            raise RequestError(f"no toy: {spec.value}", param="grammar") from None
        return ToyGrammar(lambda: ToyMatcher(seed, length))

    def close(self) -> None:
        """Nothing runs elsewhere."""


TAGS = ReasoningTags("(", "#/", is_open=True)
"""Reasoning of the fake engine's tokens; ``WORDS`` is how these read."""

WORDS: dict[str, int] = {
    "eos": EOS, "a": 2, "#": 3, "/": 4, "#/": 5, "a#/": 6, "#/a": 7, "/a": 8, "(": 9, "b#": 10,
}  # fmt: skip


class InlineCompiler(GrammarCompiler):
    """Compiles at once, so that schedules do not depend on threads."""

    def __init__(self) -> None:
        super().__init__(ToyBackend)
        self.vocabulary = Vocabulary(WORDS, [EOS], VOCAB)

    def submit(self, spec: GrammarSpec, *, wants_vocabulary: bool = False) -> Compilation:
        compilation = Compilation(spec)
        try:
            compilation.grammar = ToyBackend().compile(spec)
        except RequestError as error:
            compilation.error = error
        compilation.done = True
        return compilation
