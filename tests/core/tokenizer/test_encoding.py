"""Prompts to tokens: equal to transformers' own, and every wrong prompt is a clear refusal."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.errors import RequestError
from minisgl.tokenizer.chat import ChatOptions
from minisgl.tokenizer.encoding import PromptEncoder
from support.text_tokenizers import byte_level, sentencepiece

TOKENIZER = byte_level()
ENCODER = PromptEncoder(TOKENIZER, vocab_size=300)
WITH_BOS = sentencepiece(add_bos=True)


def user(content: object, **more: object) -> list[dict]:
    return [{"role": "user", "content": content, **more}]


def refused(prompt: Any, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        ENCODER.encode(prompt, **options)
    assert caught.value.status == 400
    return caught.value


def test_text_is_encoded_as_the_tokenizer_is_configured_to() -> None:
    assert ENCODER.encode("hello") == TOKENIZER.encode("hello")
    with_bos = PromptEncoder(WITH_BOS)
    assert with_bos.encode("Hello")[0] == WITH_BOS.bos_token_id
    assert with_bos.encode("Hello", add_special_tokens=False)[0] != WITH_BOS.bos_token_id


@given(text=st.text(max_size=20), generation=st.booleans())
def test_chat_ids_equal_the_tokenizers_own(text, generation) -> None:
    messages = [{"role": "system", "content": "x"}, *user(text)]
    expected = TOKENIZER.apply_chat_template(
        messages, add_generation_prompt=generation, return_dict=False
    )
    options = ChatOptions(add_generation_prompt=generation)
    assert ENCODER.encode(messages, options=options) == expected


def test_a_template_that_writes_bos_gets_no_second_one() -> None:
    tokenizer = sentencepiece(add_bos=True)
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    ids = PromptEncoder(tokenizer).encode(user("Hello"))
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids == tokenizer.apply_chat_template(user("Hello"), return_dict=False)


def test_text_parts_equal_the_plain_string() -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}]
    assert ENCODER.encode(user(parts)) == ENCODER.encode(user("Hello world"))


def test_template_variables_reach_the_template() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ 'yes' if thinking else 'no' }}"
    encoder = PromptEncoder(tokenizer)
    options = ChatOptions(template_kwargs={"thinking": True})
    assert tokenizer.decode(encoder.encode(user("x"), options=options)) == "yes"
    assert tokenizer.decode(encoder.encode(user("x"))) == "no"


def test_the_developer_role_is_the_system_role() -> None:
    developer = [{"role": "developer", "content": "x"}]
    assert ENCODER.encode(developer) == ENCODER.encode([{"role": "system", "content": "x"}])


def test_token_ids_pass_as_they_are() -> None:
    assert ENCODER.encode([5, 299, 0]) == [5, 299, 0]


@pytest.mark.parametrize("bad", [[5, 300], [-1], [2**40], [True], [1.0], ["a", 1], [None]])
def test_unusable_token_ids_are_refused_by_value(bad) -> None:
    error = refused(bad)
    assert error.param == "prompt"
    assert "0 to 299" in error.message


@pytest.mark.parametrize("bad", [[], None, 5, {}])
def test_what_is_no_prompt_is_refused(bad) -> None:
    assert refused(bad).param == "prompt"


def test_an_empty_text_is_bos_where_the_tokenizer_makes_one_and_refused_elsewhere() -> None:
    assert PromptEncoder(WITH_BOS).encode("") == [WITH_BOS.bos_token_id]
    assert "empty" in refused("").message


def test_lone_surrogates_are_refused() -> None:
    assert "surrogate" in refused("a\ud800b").message
    assert "surrogate" in refused(user("a\ud800b")).message


def test_the_templates_own_complaint_is_passed_on() -> None:
    error = refused([{"role": "forbidden", "content": "x"}])
    assert error.param == "messages"
    assert "no such role here" in error.message


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ messages[9].x.y }}", "{% for %}", "{{ messages.append(1) }}"]
)
def test_any_error_of_a_template_is_a_refusal(template) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    with pytest.raises(RequestError, match="chat template"):
        PromptEncoder(tokenizer).encode(user("x"))


def test_a_model_without_a_template_says_where_to_go() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = None
    with pytest.raises(RequestError, match="/v1/completions"):
        PromptEncoder(tokenizer).encode(user("x"))


@pytest.mark.parametrize(
    "name", ["tokenize", "chat_template", "messages", "return_tensors", "self"]
)
def test_template_variables_cannot_be_options_of_the_call(name) -> None:
    error = refused(user("x"), options=ChatOptions(template_kwargs={name: "x"}))
    assert error.param == "chat_template_kwargs"
    assert repr(name) in error.message


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content",
        ),
        ({"content": "x"}, "messages[0].role"),
        ({"role": 5, "content": "x"}, "messages[0].role"),
        ({}, "messages[0].role"),
    ],
)
def test_malformed_messages_are_refused_by_field(message, param) -> None:
    assert refused([message]).param == param


def test_the_second_message_is_checked_too() -> None:
    assert refused([*user("x"), 5]).param == "messages[1]"


def test_the_callers_messages_are_not_changed() -> None:
    messages = [{"role": "developer", "content": [{"type": "text", "text": "x"}], "name": None}]
    before = [dict(message) for message in messages]
    ENCODER.encode(messages)
    assert messages == before
