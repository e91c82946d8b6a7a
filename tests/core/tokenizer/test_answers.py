"""Messages that wait are answered together, as each would be alone."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.message import (
    DetokenizeOnly,
    ErrorReply,
    GenerateRequest,
    TokenizeOnly,
    TokenizeRequest,
    TokensReply,
)
from minisgl.request import SamplingParams
from minisgl.tokenizer.answers import BATCH_CHARS, answer, answers
from minisgl.tokenizer.encoding import PromptEncoder
from support.text_tokenizers import byte_level, sentencepiece

PARAMS = SamplingParams()
ENCODER = PromptEncoder(byte_level())


class Counting(PromptEncoder):
    """Notes how many texts each call encodes."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.calls: list[int] = []

    def encode_texts(self, texts: Any, add_special_tokens: bool) -> list[list[int]]:
        self.calls.append(len(texts))
        if any("broken" in text for text in texts):
            raise ValueError
        return super().encode_texts(texts, add_special_tokens)


prompts = st.one_of(
    st.text(max_size=8),
    st.lists(st.integers(0, 5), max_size=3),
    st.text(max_size=8).map(lambda text: [{"role": "user", "content": text}]),
    st.just([{"role": "user", "content": "<|im_end|>"}]),
    st.just([{"role": "user"}]),
)


@given(prompts=st.lists(prompts, max_size=8), special=st.booleans(), bos=st.booleans())
def test_together_as_alone(prompts, special, bos) -> None:
    encoder = PromptEncoder(sentencepiece(add_bos=True)) if bos else ENCODER
    messages = [
        TokenizeRequest(uid, prompt, PARAMS, add_special_tokens=special, return_prompt_tail=True)
        for uid, prompt in enumerate(prompts)
    ]
    found = {message.uid: reply for message, reply in answers(encoder, messages)}
    assert found == {message.uid: answer(encoder, message) for message in messages}


def test_short_texts_are_one_call_and_long_ones_wait_for_the_short_ones() -> None:
    encoder = Counting(byte_level())
    messages: list[TokenizeRequest | TokenizeOnly | DetokenizeOnly] = [
        TokenizeOnly(0, "x" * BATCH_CHARS),
        *(TokenizeOnly(uid, "short") for uid in range(1, 9)),
        TokenizeOnly(9, [{"role": "user", "content": "short"}]),
        TokenizeOnly(10, [5]),
        DetokenizeOnly(11, [5]),
    ]
    order = [message.uid for message, _ in answers(encoder, messages)]
    assert sorted(order) == list(range(12))
    assert order[-1] == 0
    assert sorted(encoder.calls) == [1, 1, 8]  # texts with special tokens, the chat, the long one


def test_a_text_that_cannot_be_encoded_fails_alone(caplog) -> None:
    encoder = Counting(byte_level())
    messages = [TokenizeRequest(uid, text, PARAMS) for uid, text in enumerate(["a", "broken", "b"])]
    found = {message.uid: reply for message, reply in answers(encoder, messages)}
    assert isinstance(found[1], ErrorReply)
    assert found[1].status == 500
    assert isinstance(found[0], GenerateRequest)
    assert isinstance(found[2], GenerateRequest)
    assert "ValueError" in caplog.text


@pytest.mark.parametrize(
    ("prompt", "param"),
    [("", "prompt"), ("\ud800", "prompt"), ([{"role": "user"}], "messages[0].content")],
)
def test_a_refusal_leaves_the_others_alone(prompt, param) -> None:
    messages: list[Any] = [TokenizeRequest(0, prompt, PARAMS), TokenizeOnly(1, "x")]
    found = {message.uid: reply for message, reply in answers(ENCODER, messages)}
    assert isinstance(found[0], ErrorReply)
    assert (found[0].status, found[0].param) == (400, param)
    assert isinstance(found[1], TokensReply)
