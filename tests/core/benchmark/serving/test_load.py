"""What is noted of each request, against a server whose times are known."""

import asyncio
import json

import pytest

from minisgl.benchmark.serving.figures import summarize, token_count_note
from minisgl.benchmark.serving.http_client import Head
from minisgl.benchmark.serving.load import Job, Target, request_body, run_load
from minisgl.benchmark.serving.processes import concurrency_shares, generate_load
from minisgl.benchmark.serving.records import Counted
from support.patience import FOR_EVER, PATIENCE
from support.scripted_server import (
    CLOSE,
    DONE,
    chunked,
    event,
    scripted_server,
    text_chunk,
    usage,
    whole,
)

STEP = 0.03
"""Seconds between two chunks, at least."""


def load(server, num=1, *, due=0.0, max_concurrency=None, num_processes=1, timeout=PATIENCE):
    jobs = [Job(number, number * due, b'{"number": %d}' % number) for number in range(num)]
    target = Target(server.url, "/completions", {}, timeout)
    return generate_load(target, jobs, max_concurrency=max_concurrency, num_processes=num_processes)


def one_record(*pieces, **options):
    with scripted_server(lambda *_: list(pieces)) as server:
        (record,) = load(server, **options).records
    return record


END = event({"choices": [], "usage": usage(7, 4, cached=2)})


class Played:
    """In place of the HTTP client: brings chunks at given times, in seconds after the start."""

    def __init__(self, chunks, start):
        self.chunks, self.start = chunks, start

    async def post(self, path, body, on_body):
        for at, data in self.chunks:
            on_body(data, self.start + at)
        return Head(200)

    def close(self):
        pass


def test_times_are_those_of_the_chunks(monkeypatch):
    chunks = [
        (1000.5, text_chunk("")), (1001.0, text_chunk("a")), (1003.0, text_chunk("bc")),
        (1006.0, text_chunk("d")), (1006.5, text_chunk("", "length")), (1009.0, END + DONE),
    ]  # fmt: skip
    start = 0.0  # in the past, so the request leaves at once
    monkeypatch.setattr(
        "minisgl.benchmark.serving.load.HttpClient", lambda *_: Played(chunks, start)
    )
    target = Target("http://host:1", "/completions", {}, PATIENCE)
    result = asyncio.run(run_load(target, [Job(0, 0.0, b"{}")], max_concurrency=None, start=start))
    (record,) = result.records
    assert record.error is None
    assert record.first_token == 1001.0
    assert record.ended == 1006.5, "usage and [DONE] come after the last chunk"
    assert record.intervals == [2.0, 3.0]
    assert record.ttft == 1001.0 - record.sent
    assert record.e2e == 1006.5 - record.sent
    assert record.tpot == pytest.approx(5.5 / 3)
    assert (record.output_tokens, record.counted, record.num_chunks) == (4, Counted.USAGE, 3)
    assert (record.input_tokens, record.cached_tokens) == (7, 2)
    assert record.finish_reason == "length"


def test_no_time_is_earlier_than_what_it_stands_for():
    record = one_record(
        *chunked(STEP, text_chunk(""), STEP, text_chunk("a"), STEP, text_chunk("b", "length"), DONE)
    )
    assert record.ttft >= 2 * STEP
    assert record.e2e >= 3 * STEP


def test_chunks_that_list_their_tokens_have_one_interval_each():
    def listed(text, *token_ids):
        return event({"choices": [{"text": text, "token_ids": token_ids}]})

    record = one_record(
        *chunked(listed("a", 1), STEP, listed("bcd", 2, 3, 4), text_chunk("", "stop"), DONE)
    )
    assert (record.output_tokens, record.counted) == (4, Counted.TOKEN_IDS)
    assert len(record.intervals) == 3
    assert len(set(record.intervals)) == 1
    assert sum(record.intervals) == pytest.approx(record.ended - record.first_token, abs=0.02)


def test_a_count_in_every_chunk_tells_the_tokens_of_each():
    record = one_record(
        *chunked(
            text_chunk("a", usage=usage(5, 1)), STEP, text_chunk("bcd", usage=usage(5, 4)),
            text_chunk("", "stop", usage=usage(5, 4)), DONE,
        )
    )  # fmt: skip
    assert record.output_tokens == 4
    assert len(record.intervals) == 3


def test_a_count_in_the_last_chunk_alone_is_not_the_tokens_of_that_chunk():
    record = one_record(
        *chunked(text_chunk("a"), text_chunk("b"), text_chunk("c", "stop", usage=usage(5, 9)), DONE)
    )
    assert record.output_tokens == 9
    assert len(record.intervals) == 2


def test_without_any_count_chunks_are_counted_and_a_note_says_so():
    with scripted_server(lambda *_: chunked(text_chunk("a"), text_chunk("bc"), DONE)) as server:
        result = load(server)
    assert result.records[0].output_tokens == 2
    assert result.records[0].counted == Counted.CHUNKS
    assert "no usage for 1 requests" in (token_count_note(summarize(result)) or "")


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([whole(b'{"error": {"message": "busy"}}', "503 Slow Down")], "HTTP 503: busy"),
        ([whole(b"", "302 Found", "Location: /x")], "HTTP 302: "),
        (chunked(text_chunk("a"), event({"error": {"message": "lost"}}), DONE), "lost"),
        (chunked(text_chunk("a")), "the stream ended without a finish_reason and without [DONE]"),
        (chunked(text_chunk("", "stop"), DONE), "the answer holds no token"),
        (chunked(text_chunk("a"), b"data: {\n\n", DONE), "an event is no chunk"),
        ([*chunked(text_chunk("a"))[:-1], CLOSE], "closed the connection"),
        (chunked(text_chunk("a", "error"), DONE), "finish_reason is 'error'"),
    ],
)  # fmt: skip
def test_what_is_no_complete_answer_has_failed(pieces, error):
    record = one_record(*pieces)
    assert error in record.error
    assert record.ended >= record.sent


def test_a_request_that_takes_too_long_has_failed():
    record = one_record(*chunked(text_chunk("a"), FOR_EVER, DONE), timeout=0.1)
    assert record.error == "no complete answer within 0.1 s"
    assert record.e2e >= 0.09, "timers of the loop count milliseconds"


def test_tokens_without_text_are_seen_at_the_end():
    record = one_record(*chunked(STEP, text_chunk("", "length"), END, DONE))
    assert record.error is None
    assert record.ttft == record.e2e >= STEP
    assert record.output_tokens == 4


def answer_together(num):
    """Answers that wait until so many have been asked for at once."""
    pieces = text_chunk("a"), lambda server: server.most_open >= num, text_chunk("b", "stop")
    return lambda *_: chunked(*pieces, STEP, END, DONE)


def test_never_more_than_the_allowed_number_at_once():
    with scripted_server(answer_together(2)) as server:
        result = load(server, 6, max_concurrency=2)
        assert server.most_open == 2
        assert server.num_connections <= 3, "connections are used again"
    figures = summarize(result)
    assert figures.max_concurrency == 2
    assert [record.number for record in result.records] == list(range(6))
    ends = sorted(record.ended for record in result.records)
    for place, record in enumerate(result.records[2:]):
        assert record.sent >= ends[place], "waiting for a place is not the server's time"


def test_requests_leave_when_they_are_due():
    """And do not wait for one another: no answer is complete before all are asked for."""
    with scripted_server(answer_together(4)) as server:
        records = load(server, 4, due=0.08).records
    for record in records:
        assert record.due == pytest.approx(record.number * 0.08)
        assert record.due <= record.sent
        assert record.error is None


@pytest.mark.slow
def test_several_processes_share_the_requests_and_the_places():
    with scripted_server(answer_together(3)) as server:
        result = load(server, 9, max_concurrency=3, num_processes=2)
        assert server.most_open == 3
        assert sorted(body["number"] for body in server.bodies) == list(range(9))
    assert [record.number for record in result.records] == list(range(9))
    assert len(result.health) == 2
    assert all(record.error is None for record in result.records)


def test_places_sum_to_the_whole():
    assert concurrency_shares(8, 3) == [3, 3, 2]
    assert concurrency_shares(None, 2) == [None, None]


def test_bodies_hold_what_was_asked_and_null_takes_a_field_out():
    extra = {"ignore_eos": True, "stream_options": None}
    assert json.loads(request_body([1, 2], 5, model="m", chat=False, extra=extra)) == {
        "model": "m", "prompt": [1, 2], "max_tokens": 5, "stream": True, "ignore_eos": True,
    }  # fmt: skip
    chat = json.loads(request_body("hi", 5, model="m", chat=True, extra={}))
    assert chat["messages"] == [{"role": "user", "content": "hi"}]
    assert chat["stream_options"] == {"include_usage": True}
    assert "prompt" not in chat
