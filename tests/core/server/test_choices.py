"""``n``, ``best_of``, batches of prompts times ``n``, and the seeds of the choices."""

from typing import Any

import pytest

from minisgl.message import TokenizeRequest
from minisgl.request import SamplingParams
from minisgl.server.openai.fields import choice_params
from support.http_asks import CHAT, HELLO, TEXT, error_of, events_of, post, run, whole_of
from support.in_process_engine import Served


def params_of(route: str, body: dict[str, Any]) -> list[SamplingParams]:
    async def scenario(server: Served) -> list[SamplingParams]:
        assert (await server.http.post(route, json=body)).status_code == 200
        return [request.params for request in server.engine.requests]

    return run(scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body"), [(CHAT, HELLO), (TEXT, {"prompt": "ace"})], ids=["chat", "text"]
)
def test_n_choices_come_with_their_indexes(route, body, stream) -> None:
    body = {**body, "n": 3, "max_tokens": 5}
    [alone] = post(route, {**body, "n": 1}).json()["choices"]
    text = alone["text"] if route == TEXT else alone["message"]["content"]
    if stream:
        events = events_of(post(route, {**body, "stream": True}))
        assert whole_of(route, events) == dict.fromkeys(range(3), (text, "length"))
    else:
        choices = post(route, body).json()["choices"]
        assert choices == [{**alone, "index": index} for index in range(3)]


def test_a_batch_has_n_choices_for_each_prompt_in_order() -> None:
    body = {"prompt": ["ace", "ho"], "n": 2, "max_tokens": 4}
    answer = post(TEXT, body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["acea", "acea", "hoho", "hoho"]
    streamed = whole_of(TEXT, events_of(post(TEXT, {**body, "stream": True})))
    assert [streamed[index][0] for index in range(4)] == ["acea", "acea", "hoho", "hoho"]


def test_usage_counts_a_prompt_once_and_every_choice() -> None:
    one = post(TEXT, {"prompt": ["ace", "ho"], "max_tokens": 4}).json()["usage"]
    body = {"prompt": ["ace", "ho"], "n": 3, "max_tokens": 4}
    usage = post(TEXT, body).json()["usage"]
    assert usage["prompt_tokens"] == one["prompt_tokens"] == 5
    assert usage["completion_tokens"] == 3 * one["completion_tokens"] == 24
    assert usage["prompt_tokens_details"] == one["prompt_tokens_details"]
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    assert events_of(post(TEXT, stream))[-1]["usage"] == usage


def test_a_seed_gives_each_choice_its_own_again_and_again() -> None:
    body = {"prompt": ["a", "b"], "n": 4, "seed": 7, "max_tokens": 1}
    seeds = [params.seed for params in params_of(TEXT, body)]
    assert seeds == [params.seed for params in params_of(TEXT, body)]
    assert len(set(seeds)) == 4  # both prompts have the same four
    assert seeds.count(7) == 2
    other = [params.seed for params in params_of(TEXT, {**body, "seed": 8})]
    assert not set(seeds) & set(other)


def test_without_a_seed_every_choice_draws_its_own_noise() -> None:
    assert [one.seed for one in params_of(CHAT, {**HELLO, "n": 3, "max_tokens": 1})] == [None] * 3


def test_a_choice_has_the_same_seed_whatever_n_is() -> None:
    params = SamplingParams(seed=2**63 - 1)
    seeds = [choice_params(params, number).seed for number in range(128)]
    assert len(set(seeds)) == 128
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    assert choice_params(params, 5).seed == seeds[5]


def test_the_other_choices_start_when_the_first_has_computed_the_prompt() -> None:
    async def scenario(server: Served) -> tuple[int, int]:
        import asyncio

        server.engine.paused = True
        body = {"prompt": "ace", "n": 3, "max_tokens": 9}
        task = asyncio.create_task(server.http.post(TEXT, json=body))
        while not server.engine.requests:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        early = len(server.engine.requests)
        server.engine.paused = False
        await task
        return early, len(server.engine.requests)

    assert run(scenario) == (1, 3)


def test_a_client_that_leaves_ends_choices_that_have_not_started() -> None:
    async def scenario(server: Served) -> list[int]:
        server.engine.paused = True
        generation = server.client.generate(["ace"], [SamplingParams(max_tokens=5)] * 3)
        generation.close()
        return server.engine.aborted

    assert run(scenario) == [1]


def test_choices_that_cannot_be_sent_any_more_end_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(server: Served) -> int:
        send = server.engine.send

        def only_once(message: Any) -> None:
            if isinstance(message, TokenizeRequest) and server.engine.requests:
                raise OverflowError("no such number")
            send(message)

        monkeypatch.setattr(server.engine, "send", only_once)
        answer = server.http.post(TEXT, json={"prompt": "ace", "n": 2, "max_tokens": 9})
        return (await answer).status_code

    assert run(scenario) == 400


@pytest.mark.parametrize("best_of", [1, 2, 3])
def test_best_of_up_to_n_changes_nothing(best_of) -> None:
    body = {"prompt": "ace", "n": 3, "max_tokens": 2, "best_of": best_of}
    assert len(post(TEXT, body).json()["choices"]) == 3


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (TEXT, {"best_of": 4, "n": 3}, "best_of"),
        (TEXT, {"best_of": 0}, "best_of"),
        (CHAT, {"best_of": 2}, "best_of"),
        (TEXT, {"prompt": ["x"] * 100, "n": 100}, "n"),
    ],
)
def test_more_than_the_server_makes_is_refused_by_name(route, fields, param) -> None:
    base: dict[str, Any] = HELLO if route == CHAT else {"prompt": "x"}
    response = post(route, {**base, **fields})
    assert response.status_code == 400
    assert error_of(response)["param"] == param


def test_one_failed_prompt_fails_the_request_and_nothing_is_left() -> None:
    async def scenario(server: Served) -> tuple[int, int]:
        body = {"prompt": [[70], [100000]], "n": 2, "max_tokens": 4000}
        return (await server.http.post(TEXT, json=body)).status_code, server.client.num_open

    assert run(scenario) == (400, 0)
