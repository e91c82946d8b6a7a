"""Fields that are unknown, known and not offered, or only labels; and the request's id."""

import logging
from typing import Any

import httpx
import pytest

from minisgl.server.openai.chat_request import CHAT_NOT_OFFERED, ChatRequest
from minisgl.server.openai.completion_request import COMPLETION_NOT_OFFERED, CompletionRequest
from support.http_asks import CHAT, HELLO, TEXT, error_of, events_of, post, run
from support.in_process_engine import Served

PROMPT = {"prompt": "Hello"}

both = pytest.mark.parametrize(("route", "base"), [(CHAT, HELLO), (TEXT, PROMPT)], ids=["c", "t"])


@pytest.mark.parametrize(
    ("route", "base", "name"),
    [
        *((CHAT, HELLO, name) for name in CHAT_NOT_OFFERED),
        *((TEXT, PROMPT, name) for name in COMPLETION_NOT_OFFERED),
    ],
)
def test_what_is_not_offered_is_refused_by_name_with_a_reason(route, base, name) -> None:
    response = post(route, {**base, name: "something else"})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == name
    reason = (CHAT_NOT_OFFERED if route == CHAT else COMPLETION_NOT_OFFERED)[name].reason
    assert error["message"].endswith(f"is not offered: {reason}")


@pytest.mark.parametrize(
    ("route", "base", "refused"),
    [(CHAT, HELLO, CHAT_NOT_OFFERED), (TEXT, PROMPT, COMPLETION_NOT_OFFERED)],
)
def test_values_that_ask_for_nothing_are_accepted_even_by_a_strict_server(
    route, base, refused
) -> None:
    for place in range(2):
        neutral = {n: f.neutral[place] for n, f in refused.items() if len(f.neutral) > place}
        body = {**base, "max_tokens": 1, **neutral}
        assert post(route, body, strict_requests=True).status_code == 200


def test_no_field_is_both_offered_and_not() -> None:
    assert not ChatRequest.model_fields.keys() & CHAT_NOT_OFFERED.keys()
    assert not CompletionRequest.model_fields.keys() & COMPLETION_NOT_OFFERED.keys()


def test_false_is_not_zero() -> None:
    assert post(TEXT, {**PROMPT, "top_logprobs": False}).status_code == 400


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 0}, "from 1 to 128"),
        ({"n": 129}, "from 1 to 128"),
        ({"priority": 2**31}, f"from {1 - 2**31} to {2**31 - 1}"),
        ({"best_of": 0}, "from 1 to 128"),
        ({"temperature": 101}, "from 0 to 100"),
        ({"presence_penalty": 3}, "from -2 to 2"),
        ({"logprobs": 21}, "from 0 to 20"),
        ({"top_p": 0}, "above 0 and at most 1"),
    ],
    ids=str,
)
def test_a_value_outside_its_range_is_told_the_whole_range(fields, words) -> None:
    assert words in error_of(post(TEXT, {**PROMPT, **fields}))["message"]


def test_unknown_fields_are_accepted_with_one_warning_a_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(server: Served) -> list[int]:
        body = {"prompt": "x", "max_tokens": 1, "temprature": 0}
        return [(await server.http.post(TEXT, json=body)).status_code for _ in range(3)]

    assert run(scenario) == [200, 200, 200]
    [warning] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "'temprature'" in warning
    assert "Nearest: 'temperature'" in warning


@both
def test_a_strict_server_refuses_unknown_fields_by_name(route, base, caplog) -> None:
    async def scenario(server: Served) -> list[httpx.Response]:
        body = {**base, "max_tokens": 1, "temprature": 0}
        return [await server.http.post(route, json=body) for _ in range(2)]

    for response in run(scenario, strict_requests=True):
        assert response.status_code == 400
        error = error_of(response)
        assert error["param"] == "temprature"
        assert "Nearest: 'temperature'" in error["message"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@both
def test_labels_are_accepted_and_change_nothing(route, base, caplog) -> None:
    labels: dict[str, Any] = {
        "user": "me",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "implicit"},
    }
    body = {**base, "max_tokens": 3}
    plain, labelled = post(route, body).json(), post(route, {**body, **labels}).json()
    assert labelled["choices"] == plain["choices"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert post(route, {**body, "user": 5}).status_code == 400


# The request's id


@both
@pytest.mark.parametrize("stream", [False, True])
def test_the_id_of_the_header_comes_back_and_is_part_of_the_answers_id(route, base, stream) -> None:
    body = {**base, "max_tokens": 2, "stream": stream, "request_id": "from-body"}
    response = post(route, body, headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    answer = events_of(response)[0] if stream else response.json()
    assert answer["id"] == f"{'chatcmpl' if route == CHAT else 'cmpl'}-mine-1"


@both
def test_the_body_may_name_the_request(route, base) -> None:
    response = post(route, {**base, "max_tokens": 2, "request_id": "from-body"})
    assert response.headers["x-request-id"] == "from-body"
    assert response.json()["id"].endswith("-from-body")


def test_every_answer_has_an_id_of_its_own_if_nobody_names_it() -> None:
    async def scenario(server: Served) -> list[str]:
        answers = [
            await server.http.post(TEXT, json={**PROMPT, "max_tokens": 1}),
            await server.http.post(TEXT, json={}),
            await server.http.get("/no/such"),
            await server.http.get("/v1/models"),
        ]
        return [answer.headers["x-request-id"] for answer in answers]

    assert len(set(run(scenario))) == 4


def test_two_requests_of_one_name_do_not_meet() -> None:
    async def scenario(server: Served) -> list[str]:
        import asyncio

        asks = [
            server.http.post(TEXT, json={"prompt": p, "max_tokens": 3, "request_id": "same"})
            for p in ("ace", "how")
        ]
        return [r.json()["choices"][0]["text"] for r in await asyncio.gather(*asks)]

    assert run(scenario) == ["ace", "how"]


@pytest.mark.parametrize("name", ["two words", "x" * 257, "\x7f"])
def test_a_malformed_id_is_refused(name) -> None:
    response = post(TEXT, {**PROMPT, "max_tokens": 1}, headers={"X-Request-Id": name})
    assert response.status_code == 400
    assert error_of(response)["param"] == "X-Request-Id"


def test_a_refusal_for_want_of_a_key_and_a_crash_have_an_id_too(monkeypatch) -> None:
    async def scenario(server: Served) -> list[httpx.Response]:
        monkeypatch.setattr(server.client, "generate", lambda *a, **k: 1 / 0)
        headers = {"X-Request-Id": "mine", "Authorization": "Bearer secret"}
        return [
            await server.http.get("/v1/models", headers={"X-Request-Id": "mine"}),
            await server.http.post(TEXT, json=PROMPT, headers=headers),
        ]

    refused, crashed = run(scenario, api_keys=("secret",))
    assert (refused.status_code, crashed.status_code) == (401, 500)
    assert refused.headers["x-request-id"] == crashed.headers["x-request-id"] == "mine"


def test_the_key_may_come_as_anthropics_clients_send_it() -> None:
    async def scenario(server: Served) -> list[int]:
        return [
            (await server.http.get("/version", headers={"X-Api-Key": key})).status_code
            for key in ("secret", "wrong")
        ]

    assert run(scenario, api_keys=("secret",)) == [200, 401]


@both
@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True, "stream_options": {"include_usage": None, "continuous_usage_stats": None}},
        {"structured_outputs": {"regex": "a+", "choice": None, "whitespace_pattern": None}},
        {"response_format": {"type": "text", "json_schema": None}},
    ],
    ids=str,
)
def test_null_is_absent_in_objects_too(route, base, fields) -> None:
    assert post(route, {**base, "max_tokens": 1, **fields}).status_code == 200


@both
@pytest.mark.parametrize("stream_options", [{}, {"include_usage": False}])
def test_counts_in_every_chunk_are_not_silently_left_out(route, base, stream_options) -> None:
    body = {**base, "stream": True, "max_tokens": 1}
    asked = {**stream_options, "continuous_usage_stats": True}
    error = error_of(post(route, {**body, "stream_options": asked}))
    assert error["param"] == "stream_options.continuous_usage_stats"
    assert "include_usage" in error["message"]


@both
def test_a_seed_is_a_signed_number_of_64_bits_as_openai_documents(route, base) -> None:
    def texts(seed: int) -> int:
        return post(route, {**base, "max_tokens": 1, "seed": seed}).status_code

    assert [texts(seed) for seed in (-1, -(2**63), 2**63 - 1)] == [200] * 3
    error = error_of(post(route, {**base, "seed": -(2**63) - 1}))
    assert str(-(2**63)) in error["message"]
