"""What one server takes on: how many answers, how long each, how large a body, from whose page."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl.server import middleware
from minisgl.server.client import ClientLimits
from support.in_process_engine import Served, served
from support.patience import PATIENCE

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
LONG = {"prompt": "ace", "max_tokens": 4000}
KEYS = ("first-key", "second-key")


def run(scenario: Callable[[Served], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with served(**options) as server:
            return await asyncio.wait_for(scenario(server), PATIENCE)

    return asyncio.run(main())


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_server_answers_429_and_says_when_to_come_back(stream: bool) -> None:
    async def scenario(server: Served) -> tuple[httpx.Response, httpx.Response]:
        server.engine.paused = True
        body = {"prompt": "ace", "max_tokens": 3, "n": 2}
        first = asyncio.create_task(server.http.post(TEXT, json=body))
        await until(lambda: server.client.num_open == 2)
        refused = await server.http.post(TEXT, json={**body, "stream": stream})
        server.engine.paused = False
        assert (await first).status_code == 200
        return refused, await server.http.post(TEXT, json={**body, "stream": stream})

    refused, later = run(scenario, limits=ClientLimits(max_open=3))
    assert refused.status_code == 429
    assert int(refused.headers["Retry-After"]) > 0
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert "2 answers run or wait, and it holds 3" in error["message"]
    assert later.status_code == 200


def test_questions_to_the_tokenizer_wait_in_the_same_queue() -> None:
    async def scenario(server: Served) -> list[int]:
        server.engine.paused = True
        running = asyncio.create_task(server.http.post(TEXT, json={"prompt": "ace"}))
        await until(lambda: server.client.num_open == 1)
        asks = [server.http.post("/tokenize", json={"prompt": "ace"}) for _ in range(2)]
        statuses = [(await ask).status_code for ask in asks]
        server.engine.paused = False
        await running
        return [*statuses, (await server.http.post("/tokenize", json={"prompt": "a"})).status_code]

    assert run(scenario, limits=ClientLimits(max_open=1)) == [429, 429, 200]


def test_a_request_that_never_fits_is_a_400_with_the_limit() -> None:
    async def scenario(server: Served) -> httpx.Response:
        return await server.http.post(TEXT, json={"prompt": ["a", "c"], "n": 2})

    response = run(scenario, limits=ClientLimits(max_open=3))
    assert response.status_code == 400
    assert "4 answers is more than this server holds (3" in response.json()["error"]["message"]


@pytest.mark.parametrize("asked", [0.2, None])
def test_an_answer_that_takes_too_long_is_a_504_and_is_aborted(asked: float | None) -> None:
    async def scenario(server: Served) -> tuple[httpx.Response, list[int]]:
        server.engine.paused = True
        response = await server.http.post(TEXT, json={**LONG, "n": 2, "timeout": asked})
        return response, server.engine.aborted

    response, aborted = run(scenario, limits=ClientLimits(request_timeout=0.3))
    assert response.status_code == 504
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("timeout", "timeout")
    assert f"within {asked or 0.3} s" in error["message"]
    # The second answer waits for the first one's prompt: the engine has not heard of it yet.
    assert len(aborted) == 1


def test_a_stream_that_takes_too_long_ends_with_an_error_event(tmp_path: Path) -> None:
    async def scenario(server: Served) -> tuple[httpx.Response, list[int]]:
        server.engine.scheduler.gate = tmp_path / "never"  # there is no second token
        response = await server.http.post(TEXT, json={**LONG, "stream": True, "timeout": 2})
        return response, server.engine.aborted

    response, aborted = run(scenario)
    assert response.status_code == 200
    text = response.text
    *_, last = [event for event in text.split("\n\n") if event]
    assert '"code":"timeout"' in last
    assert "[DONE]" not in text
    assert len(aborted) == 1


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (TEXT, {"prompt": "ace"}),
        (CHAT, {"messages": [{"role": "user", "content": "ace"}]}),
        ("/v1/responses", {"input": "ace"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "ace"}], "max_tokens": 5}),
    ],
)
def test_every_protocol_takes_a_timeout(route: str, body: dict[str, Any]) -> None:
    async def scenario(server: Served) -> list[httpx.Response]:
        server.engine.paused = True
        return [
            await server.http.post(route, json={**body, "timeout": timeout})
            for timeout in (0.05, 0, -1, 86401, "5")
        ]

    late, *wrong = run(scenario)
    assert late.status_code == 504
    assert "within 0.05 s (timeout)" in late.json()["error"]["message"]
    assert [response.status_code for response in wrong] == [400] * 4
    assert all("timeout" in response.json()["error"]["message"] for response in wrong)


def test_a_timed_out_answer_counts_as_failed() -> None:
    async def scenario(server: Served) -> str:
        server.engine.paused = True
        await server.http.post(TEXT, json={**LONG, "timeout": 0.05})
        return (await server.http.get("/metrics")).text

    assert 'minisgl:request_failure_total{model_name="org/fake-model"} 1.0' in run(scenario)


@pytest.mark.parametrize("route", [TEXT, "/v1/messages", "/tokenize"])
def test_the_limit_of_a_body_is_a_setting(route: str) -> None:
    async def scenario(server: Served) -> httpx.Response:
        return await server.http.post(route, content=b" " * 2049)

    response = run(scenario, max_body_bytes=2048)
    assert response.status_code == 413
    assert "2048 bytes (server.max_body_bytes)" in response.json()["error"]["message"]


def test_all_open_bodies_together_have_a_limit(monkeypatch) -> None:
    async def scenario(server: Served) -> list[int]:
        body = {"prompt": "ace" * 200, "max_tokens": 3}
        server.engine.paused = True
        first = asyncio.create_task(server.http.post(TEXT, json=body))
        await until(lambda: server.client.num_open == 1)
        refused = await server.http.post(TEXT, json=body)
        assert refused.headers["Retry-After"]
        server.engine.paused = False
        await first
        later = await server.http.post(TEXT, json=body)
        return [refused.status_code, first.result().status_code, later.status_code]

    monkeypatch.setattr(middleware.BodyMiddleware.__init__, "__defaults__", (1024,))
    assert run(scenario, max_body_bytes=1024) == [429, 200, 200]


def test_a_body_that_stops_coming_is_given_up(monkeypatch) -> None:
    async def half() -> Any:
        yield b'{"prompt": '
        await asyncio.Event().wait()

    async def scenario(server: Served) -> httpx.Response:
        return await server.http.post(TEXT, content=half())

    # httpx' own transport gives a body to the application as that asks for it.
    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", 0.05)
    response = run(scenario)
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "request_timeout"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer first-key"}, 200),
        ({"Authorization": "Bearer second-key"}, 200),
        ({"X-Api-Key": "second-key"}, 200),
        ({"Authorization": "Bearer second-ke"}, 401),
        ({"Authorization": "Bearer first-keysecond-key"}, 401),
        ({"X-Api-Key": ""}, 401),
        ({}, 401),
    ],
)
def test_any_one_of_several_keys_opens_the_door(headers: dict[str, str], status: int) -> None:
    async def scenario(server: Served) -> httpx.Response:
        return await server.http.get("/v1/models", headers=headers)

    assert run(scenario, api_keys=KEYS).status_code == status


def preflight(server: Served) -> Awaitable[httpx.Response]:
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    return server.http.options(CHAT, headers=asks)


def test_no_web_page_may_read_answers_unless_its_site_is_named() -> None:
    async def scenario(server: Served) -> tuple[httpx.Response, httpx.Response]:
        page = {"Origin": "https://a.example"}
        return await preflight(server), await server.http.get("/v1/models", headers=page)

    for response in run(scenario):
        assert "access-control-allow-origin" not in response.headers
    for response in run(scenario, cors_allow_origins=("https://b.example",)):
        assert "access-control-allow-origin" not in response.headers
    for response in run(scenario, cors_allow_origins=("https://a.example",)):
        assert response.headers["access-control-allow-origin"] == "https://a.example"


def test_a_browser_asks_first_without_a_key() -> None:
    response = run(preflight, cors_allow_origins=("https://a.example",), api_keys=KEYS)
    assert response.status_code == 200
    assert "POST" in response.headers["access-control-allow-methods"]
