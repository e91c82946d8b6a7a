"""Reasoning before a text of a given form: which tokens may come, and where the form begins."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.parsing import ContentText, ParserContext, ReasoningText
from minisgl.parsing.families import think
from minisgl.request import ReasoningTags
from minisgl.structured import MaskArray, mask_words
from minisgl.structured.reasoning import ReasoningMatcher, Vocabulary
from support.grammar_texts import allowed_tokens

TEXTS = [
    *"<>/thinkab#\n", "</", "think", "</think>", "<think>", "</think>\n", "k>", ">a", "nk>\n",
    "a</think>", "b</think", "</th", "ink>", "</think></think>", "<<", "</t", "hink>",
    "<|im_end|>", "<|im_start|>", "<0x3C>",
]  # fmt: skip
NAMES = [text.replace("\n", "Ċ") for text in TEXTS]
EOS, SPECIAL = TEXTS.index("<|im_end|>"), TEXTS.index("<|im_start|>")
FALLBACK = TEXTS.index("<0x3C>")
SIZE = len(TEXTS) + 7
"""Models pad their vocabulary."""
TAGS = ReasoningTags("<think>", "</think>")


def vocabulary() -> Vocabulary:
    ids = {name: token for token, name in enumerate(NAMES)}
    return Vocabulary({**ids, "beyond": SIZE}, {EOS, SPECIAL}, SIZE)


def text_of(token: int) -> str:
    return "<" if token == FALLBACK else TEXTS[token]


class Form:
    """The texts of some letters; keeps what it has accepted."""

    def __init__(self, letters: str = "ab<") -> None:
        self.may = [TEXTS.index(letter) for letter in letters] + [EOS]
        self.accepted: list[int] = []

    finished = False

    def fill_mask(self, mask: MaskArray) -> None:
        mask[:] = vocabulary().bits(self.may)

    def accept(self, token_id: int) -> bool:
        self.accepted.append(token_id)
        return token_id in self.may


def matcher(form: Form, *, is_open: bool = True) -> ReasoningMatcher:
    words = vocabulary()
    tags = ReasoningTags("<think>", "</think>", is_open=is_open)
    return ReasoningMatcher(form, words.rules(TAGS.begin, TAGS.end), tags, words.bits([EOS]))


def possible(found: ReasoningMatcher) -> set[int]:
    mask = np.zeros(mask_words(SIZE), dtype=np.int32)
    found.fill_mask(mask)
    return set(allowed_tokens(mask, SIZE))


def fits(text: str) -> bool:
    """Whether reasoning may read so: its tag is missing, or the end."""
    at = text.find(TAGS.end)
    return at in (-1, len(text) - len(TAGS.end))


@given(data=st.data())
def test_all_text_may_come_but_what_goes_on_behind_the_tag(data) -> None:
    form = Form()
    found, text = matcher(form), ""
    for _ in range(data.draw(st.integers(1, 30))):
        expected = {
            token
            for token in range(len(TEXTS))
            if token not in (EOS, SPECIAL) and fits(text + text_of(token))
        }
        assert possible(found) == expected
        assert not found.finished
        token = data.draw(st.sampled_from(sorted(expected)))
        assert found.accept(token)
        text += text_of(token)
        if text.endswith(TAGS.end):
            break
    assert form.accepted == []
    if text.endswith(TAGS.end):
        assert possible(found) == set(form.may)


@given(data=st.data())
def test_the_parser_of_the_answer_finds_the_same_end(data) -> None:
    form = Form("ab<>\n")
    found, text = matcher(form), ""
    for _ in range(data.draw(st.integers(1, 40))):
        token = data.draw(st.sampled_from(sorted(possible(found) - {EOS})))
        assert found.accept(token)
        text += text_of(token)
    content = "".join(text_of(token) for token in form.accepted)
    parser: Any = think(ParserContext(prompt_tail="<think>\n", constrained=True))
    cut = data.draw(st.integers(0, len(text)))
    events = [*parser.feed(text[:cut]), *parser.feed(text[cut:]), *parser.finish()]
    assert "".join(e.text for e in events if isinstance(e, ContentText)) == content
    reasoning = "".join(e.text for e in events if isinstance(e, ReasoningText))
    thought = text.removesuffix(content).removesuffix(TAGS.end).strip("\n")
    # A tag that the answer repeats behind that of the prompt is no part of the reasoning.
    assert reasoning.strip("\n") == thought.removeprefix(TAGS.begin).strip("\n")


def test_the_form_hears_of_no_token_before_it_and_of_all_behind() -> None:
    form = Form()
    found = matcher(form)
    for text in ("a", "</th", "ink>", "b", "a"):
        assert found.accept(TEXTS.index(text))
    assert [TEXTS[token] for token in form.accepted] == ["b", "a"]
    assert not found.accept(TEXTS.index("k>"))  # the form's own word


def test_an_answer_may_open_its_reasoning_with_its_first_token_only() -> None:
    opening = TEXTS.index("<think>")
    form = Form()
    found = matcher(form, is_open=False)
    assert possible(found) == {*form.may, opening}
    assert found.accept(opening)
    assert EOS not in possible(found)
    for text in ("a", "</think>", "b"):
        assert found.accept(TEXTS.index(text))
    assert possible(found) == set(form.may)
    assert [TEXTS[token] for token in form.accepted] == ["b"]

    form = Form()
    found = matcher(form, is_open=False)
    assert found.accept(TEXTS.index("a"))
    assert possible(found) == set(form.may)
    assert not found.accept(opening)


def test_a_form_that_is_over_before_it_began_is_over_only_behind_the_reasoning() -> None:
    form = Form()
    form.finished = True
    found = matcher(form)
    assert not found.finished
    assert found.accept(TEXTS.index("</think>"))
    assert found.finished


def test_an_opening_tag_of_several_tokens_is_none() -> None:
    words = Vocabulary({letter: number for number, letter in enumerate("<>think/")}, [], 8)
    assert not words.rules("<think>", "</think>").begins.any()


@pytest.mark.parametrize("tag", ["", "<th ink>", "<thínk>", "a\n"])
def test_tags_are_visible_ascii(tag) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        ReasoningTags("<think>", tag)
