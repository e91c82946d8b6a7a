"""The OpenAI routes over a real text path and an engine that echoes its prompt."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.server.app import MAX_BODY_BYTES
from support.examples import scaled
from support.fake_scheduler import MAX_SEQ_LEN
from support.http_asks import CHAT, HELLO, TEXT, error_of, events_of, post, run, text_of
from support.in_process_engine import MODEL, Served

both = pytest.mark.parametrize(
    ("route", "base"), [(CHAT, HELLO), (TEXT, {"prompt": "Hello"})], ids=["chat", "text"]
)


# Whole answers


def test_a_chat_answer_has_openais_shape() -> None:
    body = post(CHAT, {**HELLO, "max_tokens": 7}).json()
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    assert isinstance(body["created"], int)
    [choice] = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "user\nH"
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    usage = body["usage"]
    assert usage["completion_tokens"] == 7
    assert usage["total_tokens"] == usage["prompt_tokens"] + 7
    assert usage["prompt_tokens_details"] == {"cached_tokens": usage["prompt_tokens"] // 2}


def test_a_completion_has_openais_shape() -> None:
    body = post(TEXT, {"prompt": "ace", "max_tokens": 5}).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "aceac", "logprobs": None, "finish_reason": "length"}
    ]
    assert body["usage"]["prompt_tokens"] == 3


def test_prompt_tokens_equal_the_templates_own_count() -> None:
    async def scenario(server: Served) -> tuple[int, int]:
        response = await server.http.post(CHAT, json={**HELLO, "max_tokens": 1})
        own = server.engine.encoder._tokenizer.apply_chat_template(
            HELLO["messages"], add_generation_prompt=True, return_dict=False
        )
        return response.json()["usage"]["prompt_tokens"], len(own)

    answered, own = run(scenario)
    assert answered == own


@pytest.mark.parametrize(
    "prompt",
    ["ace", [97 - 30, 99 - 30], ["ace", "ho"], [[70, 71], [72]]],
    ids=["text", "ids", "texts", "id lists"],
)
def test_every_kind_of_prompt_gets_its_choices_in_order(prompt) -> None:
    body = post(TEXT, {"prompt": prompt, "max_tokens": 4}).json()
    single = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts = [prompt] if single else prompt
    assert [choice["index"] for choice in body["choices"]] == list(range(len(prompts)))
    alone = [
        post(TEXT, {"prompt": one, "max_tokens": 4}).json()["choices"][0]["text"] for one in prompts
    ]
    assert [choice["text"] for choice in body["choices"]] == alone
    assert body["usage"]["completion_tokens"] == 4 * len(prompts)


def test_the_end_of_sequence_token_ends_an_answer_with_stop() -> None:
    body = post(CHAT, HELLO).json()
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["message"]["content"] == "user\nHello"


def test_without_max_tokens_a_chat_has_all_room_and_a_completion_sixteen_tokens() -> None:
    for extra in ({}, {"max_tokens": None}):
        chat = post(CHAT, {**HELLO, "ignore_eos": True, **extra}).json()
        assert chat["usage"]["completion_tokens"] > 16
        text = post(TEXT, {"prompt": "ace", **extra}).json()
        assert text["usage"]["completion_tokens"] == 16


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    body = post(CHAT, {**HELLO, "max_tokens": 9, "max_completion_tokens": 3}).json()
    assert body["usage"]["completion_tokens"] == 3


def test_sampling_fields_reach_the_engine() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["x", "y"],
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "min_tokens": 1,
        "max_tokens": 2,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }

    async def scenario(server: Served) -> Any:
        body = {**HELLO, **fields, "priority": 4, "cache_salt": "tenant"}
        body |= {"chat_template_kwargs": {"a": 1}, "add_generation_prompt": False}
        await server.http.post(CHAT, json=body)
        return server.engine.requests[0]

    request = run(scenario)
    for name, value in fields.items():
        got = getattr(request.params, name)
        assert (list(got) if isinstance(got, tuple) else got) == value
    assert request.priority == 4
    assert request.cache_salt == "tenant"
    assert request.template_kwargs == {"a": 1}
    assert request.add_generation_prompt is False


def test_priority_and_cache_salt_hold_for_every_prompt_of_a_completion() -> None:
    async def scenario(server: Served) -> Any:
        body = {"prompt": ["a", "b"], "max_tokens": 1, "priority": -3, "cache_salt": "é"}
        await server.http.post(TEXT, json=body)
        await server.http.post(TEXT, json={"prompt": "c", "max_tokens": 1})
        return [(one.priority, one.cache_salt) for one in server.engine.requests]

    assert run(scenario) == [(-3, "é"), (-3, "é"), (0, None)]


def test_the_default_temperature_is_openais() -> None:
    async def scenario(server: Served) -> Any:
        await server.http.post(CHAT, json=HELLO)
        return server.engine.requests[0].params.temperature

    assert run(scenario) == 1.0


@pytest.mark.parametrize("stop", ["ll", ["zz", "ll"], ["a", "ll"]])
def test_a_stop_string_or_a_list_ends_the_text_before_it(stop) -> None:
    body = post(TEXT, {"prompt": "He ll", "max_tokens": 16, "stop": stop}).json()
    assert body["choices"][0]["text"] == "He "
    assert body["choices"][0]["finish_reason"] == "stop"


def test_text_parts_count_like_the_plain_string() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    plain = post(CHAT, {**HELLO, "max_tokens": 1}).json()["usage"]
    assert post(CHAT, {"messages": parts, "max_tokens": 1}).json()["usage"] == plain


# Streams


@both
def test_a_stream_is_role_content_finish_and_done(route, base) -> None:
    events = events_of(post(route, {**base, "max_tokens": 4, "stream": True}))
    assert len({event["id"] for event in events}) == 1
    assert all(event["model"] == MODEL and "usage" not in event for event in events)
    kind = "chat.completion.chunk" if route == CHAT else "text_completion"
    assert {event["object"] for event in events} == {kind}
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["length"]
    assert text_of(route, events[-1]["choices"][0]) == ""
    if route == CHAT:
        deltas = [event["choices"][0]["delta"] for event in events]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert deltas[-1] == {}
        assert all(set(delta) == {"content"} for delta in deltas[1:-1])


@both
def test_usage_comes_in_one_last_chunk_when_asked_for(route, base) -> None:
    body = {**base, "max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}
    *events, last = events_of(post(route, body))
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    plain = post(route, {**base, "max_tokens": 6}).json()["usage"]
    assert last["usage"] == plain
    assert plain["completion_tokens"] == 6


@both
@pytest.mark.parametrize("max_tokens", range(1, 17))
def test_a_stream_equals_the_whole_answer_at_every_length(route, base, max_tokens) -> None:
    text = "h😀é ll👩‍👧"
    base = {"prompt": text} if route == TEXT else {"messages": [{"role": "user", "content": text}]}
    body = {**base, "max_tokens": max_tokens}
    [choice] = post(route, body).json()["choices"]
    events = events_of(post(route, {**body, "stream": True}))
    deltas = [text_of(route, event["choices"][0]) for event in events]
    assert "".join(deltas) == text_of(route, choice)
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert not any("\ufffd" in delta for delta in deltas[:-2])


@given(
    prompt=st.text(alphabet="ab😀", min_size=1, max_size=8),
    stop=st.text(alphabet="ab😀", min_size=1, max_size=4),
)
@settings(max_examples=scaled(25))  # an example starts an application and streams
def test_streams_with_stop_strings_equal_the_whole_answer(prompt, stop) -> None:
    async def scenario(server: Served) -> tuple[Any, Any]:
        body = {"prompt": prompt, "stop": stop, "max_tokens": 24}
        whole = await server.http.post(TEXT, json=body)
        return whole.json(), events_of(await server.http.post(TEXT, json={**body, "stream": True}))

    whole, events = run(scenario)
    streamed = "".join(event["choices"][0]["text"] for event in events)
    [choice] = whole["choices"]
    assert streamed == choice["text"]
    assert stop not in streamed
    assert (choice["finish_reason"] == "stop") == (stop in prompt * 24)


def test_a_stream_of_several_prompts_has_one_finish_chunk_each() -> None:
    body = {"prompt": ["ace", "ho"], "max_tokens": 5, "stream": True}
    texts, finished = ["", ""], []
    for event in events_of(post(TEXT, body)):
        [choice] = event["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            finished.append(choice["index"])
    assert texts == ["aceac", "hohoh"]
    assert sorted(finished) == [0, 1]


@both
def test_a_refusal_is_a_400_even_for_a_stream(route, base) -> None:
    base = (
        {"prompt": [299, 300]}
        if route == TEXT
        else {"messages": [{"role": "forbidden", "content": "x"}]}
    )
    response = post(route, {**base, "stream": True})
    assert response.status_code == 400
    error_of(response)


def test_an_error_in_the_middle_of_a_stream_is_its_last_event() -> None:
    async def scenario(server: Served) -> str:
        from minisgl.errors import RequestError

        task = asyncio.create_task(
            server.http.post(TEXT, json={"prompt": "ace", "max_tokens": 4000, "stream": True})
        )
        while not server.engine.scheduler._num_steps > 3:
            await asyncio.sleep(0.001)
        server.client.fail_all(RequestError("the engine is gone", status=500))
        return (await task).text

    last = run(scenario).removesuffix("\n\n").split("\n\n")[-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["message"] == "the engine is gone"
    assert error["type"] == "server_error"


# Refusals

BAD_VALUES = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e9}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**70}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x"] * 100}, "stop"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"priority": "high"}, "priority"),
    ({"priority": 2**31}, "priority"),
    ({"priority": 10**40}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"no_such": True}}, "stream_options.no_such"),
    ({"model": 5}, "model"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1.5}, "n"),
    ({"presence_penalty": 50}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"99999999999": 5}}, "logit_bias"),
    ({"logit_bias": {"x": 5}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 1}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"bad_words": [""]}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"request_id": "two words"}, "request_id"),
    ({"request_id": ""}, "request_id"),
    ({"response_format": {"type": "sound"}}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[1]"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"regex": ""}, "regex"),
    ({"ebnf": ""}, "ebnf"),
    ({"regex": "a", "guided_json": {}}, "regex"),
    ({"response_format": {"type": "json_object"}, "ebnf": "a"}, "ebnf"),
]

NEUTRAL = {
    "n": 1,
    "best_of": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "tools": None,
    "tool_choice": "none",
    "echo": False,
    "suffix": None,
    "stop": None,
    "seed": None,
    "temperature": None,
    "stream_options": None,
    "user": "me",
    "metadata": {"a": "b"},
}


@both
@pytest.mark.parametrize(("fields", "param"), BAD_VALUES)
def test_a_bad_value_is_a_400_that_names_the_field(route, base, fields, param) -> None:
    response = post(route, {**base, **fields})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split(".")[0] in error["message"]


@both
def test_values_that_ask_for_nothing_are_accepted(route, base, caplog) -> None:
    assert post(route, {**base, "max_tokens": 2, **NEUTRAL}).status_code == 200
    assert "unknown" not in caplog.text


def test_max_completion_tokens_is_named_when_it_is_at_fault() -> None:
    error = error_of(post(CHAT, {**HELLO, "max_completion_tokens": 0}))
    assert error["param"] == "max_completion_tokens"


@both
@pytest.mark.parametrize(
    "content",
    [b"[1, 2, 3]", b"null", b"5", b'"x"', b"", b"{", b'{"a": NaN}', b"\xff", b"[" * 100_000],
)
def test_a_body_that_is_no_json_object_is_a_400(route, base, content) -> None:
    response = post(route, None, content=content)
    assert response.status_code == 400
    assert "body" in error_of(response)["message"]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        [{}],
        [None],
        [{"content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "Hello",
        [{"role": "forbidden", "content": "x"}],
        [{"role": "user", "content": "x", "big": 2**70}],
    ],
    ids=str,
)
def test_malformed_messages_are_a_400(messages) -> None:
    async def scenario(server: Served) -> tuple[httpx.Response, httpx.Response]:
        bad = await server.http.post(CHAT, json={"messages": messages})
        return bad, await server.http.post(CHAT, json={**HELLO, "max_tokens": 1})

    bad, next_one = run(scenario)
    if messages and isinstance(messages[0], dict) and "big" in messages[0]:
        assert bad.status_code in (200, 400)
    else:
        assert bad.status_code == 400
        error_of(bad)
    assert next_one.status_code == 200


def test_the_templates_message_is_in_the_refusal() -> None:
    response = post(CHAT, {"messages": [{"role": "forbidden", "content": "x"}]})
    assert "no such role here" in error_of(response)["message"]


@pytest.mark.parametrize(
    "prompt",
    [None, [], "", 5, {}, [[]], ["a", 1], [1, [2]], [True], [1.5], [-1], [5, 1000000], [2**70]],
    ids=str,
)
def test_a_malformed_prompt_is_a_400_and_the_next_request_works(prompt) -> None:
    async def scenario(server: Served) -> tuple[httpx.Response, httpx.Response]:
        bad = await server.http.post(TEXT, json={"prompt": prompt, "max_tokens": 2})
        return bad, await server.http.post(TEXT, json={"prompt": "x", "max_tokens": 2})

    bad, next_one = run(scenario)
    assert bad.status_code == 400
    error_of(bad)
    assert next_one.status_code == 200


def test_a_lone_surrogate_is_a_400() -> None:
    assert post(TEXT, None, content=b'{"prompt": "a\\ud800b"}').status_code == 400


def test_a_prompt_longer_than_the_context_is_a_400_that_names_the_length() -> None:
    response = post(TEXT, {"prompt": "a" * (MAX_SEQ_LEN + 1), "max_tokens": 1})
    assert response.status_code == 400
    assert str(MAX_SEQ_LEN) in error_of(response)["message"]


def test_too_many_prompts_are_refused() -> None:
    assert error_of(post(TEXT, {"prompt": ["x"] * 2000}))["param"] == "prompt"


def test_one_bad_prompt_of_a_batch_refuses_all_and_aborts_the_others() -> None:
    async def scenario(server: Served) -> tuple[int, list[int]]:
        response = await server.http.post(
            TEXT, json={"prompt": [[70], [100000]], "max_tokens": 4000}
        )
        while server.engine.scheduler.num_running or server.engine.transport.inbox:
            await asyncio.sleep(0.001)
        return response.status_code, server.engine.aborted

    assert run(scenario) == (400, [1])


@both
def test_another_models_name_is_a_404_that_names_it(route, base) -> None:
    response = post(route, {**base, "model": "no-such-model"})
    assert response.status_code == 404
    error = error_of(response)
    assert "no-such-model" in error["message"]
    assert error["code"] == "model_not_found"
    assert post(route, {**base, "model": MODEL, "max_tokens": 1}).status_code == 200


@given(
    body=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "prompt",
                        "messages",
                        "stop",
                        "max_tokens",
                        "role",
                        "content",
                        "stream",
                        "logit_bias",
                        "x",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=10,
    )
)
@settings(max_examples=scaled(60))  # an example starts an application
def test_invariant_14_any_json_gets_an_answer_and_the_next_request_is_served(body) -> None:
    """Never a 500, never silence. Catches: a field of a wrong type that ends a worker or a task."""

    async def scenario(server: Served) -> list[int]:
        content = json.dumps(body).encode()
        codes = [(await server.http.post(r, content=content)).status_code for r in (CHAT, TEXT)]
        return [*codes, (await server.http.post(CHAT, json={**HELLO, "max_tokens": 1})).status_code]

    *codes, next_code = run(scenario)
    assert set(codes) <= {200, 400}
    assert next_code == 200


@both
def test_text_that_must_be_too_long_never_reaches_the_tokenizer(
    route: str, base: dict[str, Any]
) -> None:
    text = "x" * 10**6

    async def scenario(server: Served) -> None:
        parts = [{"type": "text", "text": text}]
        bodies: list[dict[str, Any]] = (
            [{"prompt": text}, {"prompt": ["x", text]}]
            if route == TEXT
            else [{"messages": [{"role": "user", "content": c}]} for c in (text, parts)]
        )
        for body in bodies:
            response = await server.http.post(route, json={**base, **body})
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"
            assert response.json()["error"]["param"] in body
        assert server.engine.requests == []

    run(scenario)


@both
def test_a_body_larger_than_any_request_is_refused_without_reading_it_all(
    route: str, base: dict[str, Any]
) -> None:
    response = post(route, None, content=b" " * (MAX_BODY_BYTES + 1))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert post(route, None, content=json.dumps(base).encode() + b" " * 10**6).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"model": "x" * 10**6, **HELLO},
        {"stream_options": {"x" * 10**6: 1}, "stream": True, **HELLO},
        {"messages": [{"role": "user", "content": {"x" * 10**6: 1}}]},
    ],
)
def test_an_error_quotes_only_the_beginning_of_what_was_sent(body: dict[str, Any]) -> None:
    response = post(CHAT, body)
    assert response.status_code in {400, 404}
    assert len(response.content) < 10_000


@both
def test_a_client_that_leaves_while_it_sends_is_no_crash(
    route: str, base: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(server: Served) -> list[Any]:
        messages = iter(
            [
                {"type": "http.request", "body": b"{", "more_body": True},
                {"type": "http.disconnect"},
            ]
        )
        sent: list[Any] = []

        async def receive() -> Any:
            return next(messages)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": route,
            "headers": [],
            "query_string": b"",
        }
        await server.app(scope, receive, send)
        return sent

    assert run(scenario)[0]["status"] == 499
    assert not caplog.records
