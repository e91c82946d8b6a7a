"""Server-sent events and chunks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.benchmark.serving.chunks import (
    BadStreamError,
    EventReader,
    decode_chunk,
    error_message,
)

DATA = st.lists(st.text(alphabet="ab:\u00e9 ", min_size=1), max_size=5)


@given(DATA, st.sampled_from([b"\n", b"\r\n"]), st.data())
def test_events_do_not_depend_on_how_the_bytes_arrive(texts, end, data):
    stream = b": a comment" + end + end
    for text in texts:
        stream += b"event: x" + end + b"data: " + text.encode() + end + end
    reader, found, at = EventReader(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        found += reader.feed(stream[at : at + size])
        at += size
    assert [one.decode() for one in found + reader.close()] == texts


def test_lines_of_one_event_belong_together_and_a_last_one_may_be_open():
    reader = EventReader()
    assert reader.feed(b"data: a\ndata:b\n\nid: 7\n\ndata: [DONE]") == [b"a\nb"]
    assert reader.close() == [b"[DONE]"]


@pytest.mark.parametrize(
    ("choice", "has_output"),
    [
        ({"text": "a"}, True),
        ({"text": ""}, False),
        ({"text": "", "token_ids": [5]}, True),
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {"content": "a"}}, True),
        ({"delta": {"reasoning_content": "a"}}, True),
        ({"delta": {"reasoning": "a"}}, True),
        ({"delta": {"tool_calls": [{"index": 0}]}}, True),
        ({"delta": {}, "finish_reason": "stop"}, False),
    ],
)
def test_only_generated_tokens_are_output(choice, has_output):
    assert decode_chunk(json.dumps({"choices": [choice]}).encode()).has_output == has_output


def test_unknown_fields_and_nulls_do_no_harm():
    chunk = decode_chunk(
        b'{"id": 1, "choices": [{"index": 0, "text": null, "logprobs": {}, "x": [1]}], '
        b'"usage": {"prompt_tokens": 3, "completion_tokens": null, "prompt_tokens_details": null}}'
    )
    assert chunk.usage is not None
    assert (chunk.usage.prompt_tokens, chunk.usage.cached_tokens) == (3, None)
    assert not chunk.has_output


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"error": {"message": "out of memory", "code": 500}}', "out of memory"),
        (b'{"object": "error", "message": "too long"}', "too long"),
        (b"{no json", "an event is no chunk"),
        (b'{"choices": 5}', "an event is no chunk"),
    ],
)
def test_an_error_in_a_stream_is_an_error(data, message):
    with pytest.raises(BadStreamError, match=message):
        decode_chunk(data)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no"}}', "no"),
        (b'{"error": "no"}', "no"),
        (b'{"detail": [{"loc": ["body"]}]}', '[{"loc":["body"]}]'),
        (b"<html>\n 502</html>", "<html> 502</html>"),
        (b"", ""),
        (b"x" * 500, "x" * 197 + "..."),
    ],
)
def test_what_a_server_says_is_found_in_any_form(body, message):
    assert error_message(body) == message
