"""Reasoning before a text of a given form: free up to its closing tag, then the grammar's.

Where the free text ends is decided by its characters, not by one token's id, as the parser of the
answer decides it: both must agree on every text. Tokens that would end a tag and go on behind it
are impossible, so the grammar begins with a token.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np

from minisgl.request import ReasoningTags
from minisgl.structured.interface import MaskArray, Matcher, mask_words

_BYTE_FALLBACK: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """The tokens of a model, as far as tags are concerned.

    Tags are printable ASCII without white space, which tokenizers of all kinds write as it is in
    the names of their tokens.

    Args:
        tokens: ids by name, as the tokenizer has them.
        special_ids: tokens that are no text.
        vocab_size: of the model, which may have ids without a token.
    """

    def __init__(
        self, tokens: Mapping[str, int], special_ids: Iterable[int], vocab_size: int
    ) -> None:
        self._size = vocab_size
        self._special = frozenset(special_ids)
        self._texts = [""] * vocab_size
        for name, token in tokens.items():
            if 0 <= token < vocab_size:
                self._texts[token] = _text(name)
        order = sorted(range(vocab_size), key=self._texts.__getitem__)
        self._sorted_ids = order
        self._sorted_texts = [self._texts[token] for token in order]
        self._rules: dict[tuple[str, str], TagRules] = {}

    def text(self, token: int) -> str:
        """Return what a token adds to a text, if it is ASCII; else something as long as it is."""
        return self._texts[token] if 0 <= token < self._size else ""

    def rules(self, begin: str, end: str) -> "TagRules":
        """Return what holds for reasoning between two tags; made once a pair."""
        found = self._rules.get((begin, end))
        if found is None:
            found = self._rules[begin, end] = self._make_rules(begin, end)
        return found

    def _make_rules(self, begin: str, end: str) -> "TagRules":
        begins, ends = list(self._called(begin)), set(self._called(end))
        no_text = {t for t in range(self._size) if not self._texts[t] or t in self._special}
        goes_on = {
            token
            for token, text in enumerate(self._texts)
            if (at := text.find(end)) >= 0 and at + len(end) < len(text)
        }
        always = self.bits((no_text | goes_on) - ends)
        behind = [always]
        for known in range(1, len(end)):
            rest = end[known:]
            beyond = (t for t in self._starting(rest) if len(self._texts[t]) > len(rest))
            behind.append(self.bits(beyond))
        return TagRules(self, end, self.bits(begins), behind)

    def _called(self, text: str) -> Iterator[int]:
        return (token for token in self._starting(text) if self._texts[token] == text)

    def _starting(self, text: str) -> Iterator[int]:
        """Yield the tokens whose text begins with ``text``."""
        for place in range(bisect_left(self._sorted_texts, text), self._size):
            if not self._sorted_texts[place].startswith(text):
                return
            yield self._sorted_ids[place]

    def bits(self, tokens: Iterable[int]) -> MaskArray:
        """Return a mask with the bits of these tokens."""
        flags = np.zeros(mask_words(self._size) * 32, dtype=np.uint8)
        flags[list(tokens)] = 1
        return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)


class TagRules:
    """What holds for reasoning between two tags.

    Attributes:
        begins: int32 ``[words]``: the tokens that are the opening tag; of more than one token it
            cannot be told from the beginning of a text that the grammar rules.
    """

    def __init__(
        self, vocabulary: Vocabulary, end: str, begins: MaskArray, behind: list[MaskArray]
    ) -> None:
        self.begins = begins
        self._vocabulary = vocabulary
        self._end = end
        self._behind = behind

    def forbid(self, tail: str, mask: MaskArray) -> None:
        """Take the tokens out of ``mask`` that cannot follow reasoning which ends with ``tail``."""
        mask &= ~self._behind[0]
        for known in range(1, len(self._end)):
            if tail.endswith(self._end[:known]):
                mask &= ~self._behind[known]

    def follow(self, tail: str, token: int) -> str | None:
        """Return the end of the reasoning with one more token; ``None`` if that closes it."""
        text = tail + self._vocabulary.text(token)
        return None if text.endswith(self._end) else text[1 - len(self._end) :]


class ReasoningMatcher:
    """Lets reasoning pass before the text that another matcher follows.

    Args:
        matcher: at the beginning of its text.
        rules: of the tags.
        tags: whether the prompt has opened the reasoning.
        eos: int32 ``[words]``: tokens that would end the answer, which reasoning cannot.
    """

    def __init__(
        self, matcher: Matcher, rules: TagRules, tags: ReasoningTags, eos: MaskArray
    ) -> None:
        self._matcher = matcher
        self._rules = rules
        self._eos = eos
        self._tail: str | None = "" if tags.is_open else None
        self._may_open = not tags.is_open

    @property
    def finished(self) -> bool:
        """Whether the text is over."""
        return self._tail is None and self._matcher.finished

    def fill_mask(self, mask: MaskArray) -> None:
        """Write which tokens may come next."""
        if self._tail is None:
            self._matcher.fill_mask(mask)
            if self._may_open:
                mask |= self._rules.begins
            return
        mask[:] = -1
        mask &= ~self._eos
        self._rules.forbid(self._tail, mask)

    def accept(self, token_id: int) -> bool:
        """Take the next token of the answer; returns whether it could come."""
        if self._tail is not None:
            self._tail = self._rules.follow(self._tail, token_id)
            return True
        if self._may_open:
            self._may_open = False
            if int(self._rules.begins[token_id // 32]) >> token_id % 32 & 1:
                self._tail = ""
                return True
        return self._matcher.accept(token_id)


def _text(name: str) -> str:
    """Return the text of a token's name, as far as it is ASCII."""
    found = _BYTE_FALLBACK.fullmatch(name)
    return name if found is None else chr(int(found[1], 16))
