"""``logprobs``, ``echo``, ``prompt_logprobs`` and ``return_token_ids`` in the clients' shapes."""

import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl import request as request_module
from minisgl.message import PromptEcho, TokenLogprob, TopLogprob
from minisgl.server.openai.logprobs import (
    FLOOR,
    CompletionLogprobs,
    chat_logprobs,
    prompt_logprobs,
)
from support.http_asks import CHAT, HELLO, TEXT, error_of, events_of, post
from support.text_tokenizers import byte_level


@pytest.fixture(autouse=True)
def everything_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replies are made up here, so the engine need not offer the fields yet."""
    monkeypatch.setattr(request_module, "_NOT_YET", {}, raising=False)


def ids_of(text: str) -> list[int]:
    return byte_level()(text)["input_ids"]


def merged(pieces: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    return {key: [value for piece in pieces for value in piece[key]] for key in pieces[0]}


# Chat


@pytest.mark.parametrize("num_top", [0, 3])
def test_chat_logprobs_have_openais_shape_streamed_and_not(num_top) -> None:
    body = {**HELLO, "max_tokens": 6, "logprobs": True, "top_logprobs": num_top}
    [choice] = post(CHAT, body).json()["choices"]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert len(content) == 6
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == num_top
        assert all(set(top) == {"token", "logprob", "bytes"} for top in entry["top_logprobs"])
    streamed = [
        entry
        for event in events_of(post(CHAT, {**body, "stream": True}))
        if event["choices"][0]["logprobs"]
        for entry in event["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == content


def test_without_logprobs_the_field_is_null_everywhere() -> None:
    for event in events_of(post(CHAT, {**HELLO, "max_tokens": 3, "stream": True})):
        assert event["choices"][0]["logprobs"] is None
    [choice] = post(TEXT, {"prompt": "ace", "max_tokens": 3}).json()["choices"]
    assert choice["logprobs"] is None


def test_the_bytes_of_split_characters_are_the_texts_own() -> None:
    messages = [{"role": "user", "content": "é😀日"}]
    body = {"messages": messages, "max_tokens": 40, "logprobs": True, "ignore_eos": True}
    [choice] = post(CHAT, body).json()["choices"]
    data = b"".join(bytes(entry["bytes"] or []) for entry in choice["logprobs"]["content"])
    assert "é😀日".encode() in data
    assert any("\ufffd" in entry["token"] for entry in choice["logprobs"]["content"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
    ],
)
def test_a_chat_refuses_other_numbers(fields, param) -> None:
    response = post(CHAT, {**HELLO, **fields})
    assert response.status_code == 400
    assert error_of(response)["param"] == param


# Completions


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_completion_logprobs_have_openais_shape_streamed_and_not(num_top) -> None:
    body = {"prompt": "hello wé😀", "max_tokens": 12, "logprobs": num_top}
    [choice] = post(TEXT, body).json()["choices"]
    found = choice["logprobs"]
    assert set(found) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert len({len(values) for values in found.values()}) == 1
    for token, value, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert token in top
        assert 1 <= len(top) <= num_top + 1
        assert top[token] >= value
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token)
    events = events_of(post(TEXT, {**body, "stream": True}))
    pieces = [event["choices"][0]["logprobs"] for event in events]
    assert merged([piece for piece in pieces if piece]) == found


@pytest.mark.parametrize("logprobs", [21, -1, True, "3"])
def test_a_completion_refuses_other_numbers(logprobs) -> None:
    response = post(TEXT, {"prompt": "x", "logprobs": logprobs})
    assert response.status_code == 400
    assert error_of(response)["param"] == "logprobs"


def test_offsets_of_split_characters_are_those_of_the_character() -> None:
    tokens = [
        TokenLogprob(TopLogprob(0, "", data, -1.0))
        for data in (b"a", b"\xf0\x9f", b"\x98", b"\x80b", b"\xc3", b"\xa9", b"", b"c")
    ]
    pieces = CompletionLogprobs()
    offsets = [offset for token in tokens for offset in pieces.piece([token])["text_offset"]]
    assert offsets == [0, 1, 1, 1, 3, 3, 4, 4]


def alternatives(*found: tuple[int, str, bytes, float]) -> dict[str, float]:
    """``top_logprobs`` of a token whose alternatives are these, the last one the token itself."""
    tops = [TopLogprob(token, text, data, value) for token, text, data, value in found]
    [top] = CompletionLogprobs().piece([TokenLogprob(tops[-1], tops)])["top_logprobs"]
    assert top is not None
    return top


def test_alternatives_that_are_parts_of_characters_are_told_apart_by_their_bytes() -> None:
    part = "\ufffd"
    assert alternatives(
        (1, part, b"\xf0\x9f", -1.0), (2, part, b"\x98", -2.0), (3, "a", b"a", -3.0),
        (4, f"a{part}", b"a\xc3", -4.0), (5, part, part.encode(), -5.0),
    ) == {
        "bytes:\\xf0\\x9f": -1.0, "bytes:\\x98": -2.0, "a": -3.0, "bytes:\\x61\\xc3": -4.0,
        part: -5.0,
    }  # fmt: skip


def test_alternatives_of_one_text_are_all_there_the_likeliest_under_it() -> None:
    found = alternatives((65, "A", b"A", -1.0), (3, "A", b"A", -2.0), (9, "", b"", -3.0))
    assert found == {"A": -1.0, "token_id:3": -2.0, "": -3.0}


# Echo


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_echo_returns_the_prompt_before_the_answer(stream, n) -> None:
    body = {"prompt": ["ace", "h😀"], "echo": True, "max_tokens": 3, "n": n, "stream": stream}
    response = post(TEXT, body)
    texts = [""] * 2 * n
    answer = events_of(response) if stream else [response.json()]
    for part in answer:
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"]
    ace, smile = "aceace", "h😀h\ufffd"
    assert texts == [ace] * n + [smile] * n


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_max_tokens_0_with_echo_is_the_prompt_alone(stream, logprobs) -> None:
    body = {"prompt": "hello w", "echo": True, "max_tokens": 0, "logprobs": logprobs}
    body |= {"stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}
    response = post(TEXT, body)
    parts = events_of(response) if stream else [response.json()]
    choices = [choice for part in parts for choice in part["choices"]]
    assert "".join(choice["text"] for choice in choices) == "hello w"
    assert choices[-1]["finish_reason"] == "length"
    assert parts[-1]["usage"]["completion_tokens"] == 0
    assert parts[-1]["usage"]["total_tokens"] == len(ids_of("hello w"))
    found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    if logprobs is None:
        assert not found
    else:
        assert found[0]["tokens"] == ["hello", " w"]


def test_max_tokens_0_without_echo_is_refused_with_the_range() -> None:
    error = error_of(post(TEXT, {"prompt": "x", "max_tokens": 0}))
    assert error["param"] == "max_tokens"
    assert "at least 1" in error["message"]
    assert "echo" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_begins_with_null(stream) -> None:
    prompt = "hello w"
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 4, "stream": stream}
    response = post(TEXT, body)
    if stream:
        choices = [event["choices"][0] for event in events_of(response)]
        found = merged([choice["logprobs"] for choice in choices if choice["logprobs"]])
        text = "".join(choice["text"] for choice in choices)
    else:
        [choice] = response.json()["choices"]
        found, text = choice["logprobs"], choice["text"]
    num_prompt = len(ids_of(prompt))
    assert len(found["tokens"]) == num_prompt + 4
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert None not in found["token_logprobs"][1:]
    assert "".join(found["tokens"]) == text
    assert found["text_offset"] == [
        len("".join(found["tokens"][:place])) for place in range(len(found["tokens"]))
    ]


def test_offsets_count_the_characters_that_bytes_without_a_text_become() -> None:
    pieces = [b"#", b"\xf0", b"\xa1", b"x", b"\x80", b"\xff", b"\xe6\x97", b"\xc3", b"\xa9", b"y"]
    text = b"".join(pieces).decode(errors="replace")
    tokens = [TokenLogprob(TopLogprob(0, "", data, -1.0)) for data in pieces]
    offsets = CompletionLogprobs().piece(tokens)["text_offset"]
    assert offsets == [0, 1, 1, 2, 3, 4, 5, 6, 6, 7]
    assert [text[offsets[place]] for place in (0, 3, 8, 9)] == ["#", "x", "é", "y"]


@given(data=st.binary(max_size=12), cuts=st.lists(st.integers(0, 12), max_size=6))
def test_a_token_begins_at_its_offset_whatever_its_bytes(data, cuts) -> None:
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    pieces = [data[start:end] for start, end in pairwise([0, *ends]) if start < end]
    tokens = [TokenLogprob(TopLogprob(0, "", piece, -1.0)) for piece in pieces]
    offsets = CompletionLogprobs().piece(tokens)["text_offset"]
    for place, offset in enumerate(offsets):
        before = b"".join(pieces[:place])
        # The first byte changes nothing of what is whole before it, and belongs to the last
        # character so far.
        assert offset == len((before + pieces[place][:1]).decode(errors="replace")) - 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("tail", ["", "ace"])
def test_a_part_of_a_character_does_not_move_what_follows(half, tail, stream) -> None:
    prompt = [*ids_of("h"), ids_of("😀")[half], *(ids_of(tail) if tail else [])]
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": len(prompt)}
    answer = post(TEXT, {**body, "stream": stream})
    choices = [e["choices"][0] for e in events_of(answer)] if stream else answer.json()["choices"]
    text = "".join(choice["text"] for choice in choices)
    found = merged([choice["logprobs"] for choice in choices if choice["logprobs"]])
    assert text == 2 * f"h\ufffd{tail}"
    part = ("bytes:\\xf0\\x9f", "bytes:\\x98")[half]
    assert found["tokens"] == ["h", part, *tail, "h", part, *tail]
    assert found["text_offset"] == list(range(len(text)))


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_without_an_answer_has_no_tokens_of_one(stream) -> None:
    body = {"prompt": "ace", "echo": True, "max_tokens": 0, "return_token_ids": True}
    answer = post(TEXT, {**body, "stream": stream})
    choices = [e["choices"][0] for e in events_of(answer)] if stream else answer.json()["choices"]
    assert choices[0]["token_ids"] == []
    assert choices[0]["prompt_token_ids"] == ids_of("ace")


# Prompt


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_prompt_logprobs_have_vllms_shape(route, stream) -> None:
    base = HELLO if route == CHAT else {"prompt": "hello w"}
    body = {**base, "max_tokens": 2, "prompt_logprobs": 2, "stream": stream}
    response = post(route, body)
    parts = events_of(response) if stream else [response.json()]
    holders = parts if route == CHAT else [c for part in parts for c in part["choices"]]
    [found] = [holder["prompt_logprobs"] for holder in holders if "prompt_logprobs" in holder]
    assert found[0] is None
    assert len(found) > 1
    for entry in found[1:]:
        assert 1 <= len(entry) <= 3
        for token_id, top in entry.items():
            assert token_id.isdigit()
            assert set(top) == {"logprob", "rank", "decoded_token"}


def test_echo_and_prompt_logprobs_each_get_their_own_number() -> None:
    body = {"prompt": "hello w", "echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 1}
    [choice] = post(TEXT, body).json()["choices"]
    assert len(choice["prompt_logprobs"][1]) == 4
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_token_ids_come_back_as_vllm_sends_them(route, stream) -> None:
    base = HELLO if route == CHAT else {"prompt": "aceace"}
    body = {**base, "max_tokens": 5, "return_token_ids": True, "n": 2, "stream": stream}
    response = post(route, body)
    parts = events_of(response) if stream else [response.json()]
    prompts = [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part]
    ids: list[list[int]] = [[], []]
    for part in parts:
        for choice in part["choices"]:
            ids[choice["index"]] += choice.get("token_ids", [])
            if "prompt_token_ids" in choice:
                prompts.append(choice["prompt_token_ids"])
    assert ids[0] == ids[1]
    assert ids[0] == prompts[0][:5]
    assert len(prompts) == (1 if route == CHAT else 2)
    if route == TEXT:
        assert prompts == [ids_of("aceace")] * 2


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_continuous_usage_counts_up_in_every_chunk(route) -> None:
    base = HELLO if route == CHAT else {"prompt": "ace"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**base, "max_tokens": 5, "stream": True, "stream_options": options}
    events = events_of(post(route, body))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert len({event["usage"]["prompt_tokens"] for event in events}) == 1
    assert events[0]["usage"]["prompt_tokens"] > 0
    assert events[-1]["choices"] == []


# What JSON cannot hold


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan, -1e30])
def test_no_infinity_and_no_nan_reaches_a_client(value) -> None:
    token = TokenLogprob(TopLogprob(5, "x", b"x", value, 1), [TopLogprob(6, "y", b"", value, 2)])
    shapes = [
        chat_logprobs([token]),
        CompletionLogprobs().piece([token]),
        prompt_logprobs(PromptEcho([5, 5], "xx", [None, token]), 1),
    ]
    text = json.dumps(shapes, allow_nan=False)
    assert str(FLOOR) in text
    assert "e+30" not in text
