"""Health, models, keys, unknown routes, clients that leave: the server around the answers."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from minisgl.errors import RequestError
from minisgl.message import ForgetRequests, TokenizeOnly
from minisgl.server import heartbeat as heartbeat_module
from support.in_process_engine import MODEL, Served, served
from support.patience import PATIENCE

TEXT = "/v1/completions"
LONG = {"prompt": "ace", "max_tokens": 4000}


def run(scenario: Callable[[Served], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with served(**options) as server:
            return await asyncio.wait_for(scenario(server), PATIENCE)

    return asyncio.run(main())


def get(path: str, *, method: str = "GET", api_keys: tuple[str, ...] = (), **headers: str) -> Any:
    async def scenario(server: Served) -> httpx.Response:
        return await server.http.request(method, path, headers=headers)

    return run(scenario, api_keys=api_keys)


async def healthy(server: Served) -> httpx.Response:
    for _ in range(200):
        response = await server.http.get("/health")
        if response.status_code == 200:
            break
        await asyncio.sleep(0.01)
    return response


def test_health_is_200_once_the_scheduler_answers() -> None:
    assert run(healthy).json()["status"] == "ok"


def test_health_is_503_with_the_reason_without_a_heartbeat() -> None:
    async def scenario(server: Served) -> httpx.Response:
        return await server.http.get("/health")

    response = run(scenario, pings=False)
    assert response.status_code == 503
    assert "has not answered" in response.json()["error"]["message"]


def test_health_is_503_when_the_heartbeat_grows_old(monkeypatch) -> None:
    async def scenario(server: Served) -> httpx.Response:
        await healthy(server)
        monkeypatch.setattr(heartbeat_module, "HEARTBEAT_TIMEOUT", -1.0)
        return await server.http.get("/health")

    response = run(scenario)
    assert response.status_code == 503
    assert "has not answered for" in response.json()["error"]["message"]


def test_models_lists_the_served_one_under_its_name() -> None:
    [card] = get("/v1/models").json()["data"]
    assert (card["id"], card["object"]) == (MODEL, "model")
    assert get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    assert get("/v1/models/no/such").status_code == 404


def test_version_is_the_packages_own() -> None:
    from minisgl import __version__

    assert get("/version").json() == {"version": __version__}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/no/such", 404), ("POST", "/", 404), ("GET", TEXT, 405), ("DELETE", "/health", 405)],
)
def test_unknown_routes_and_methods_have_openais_error_form(method, path, status) -> None:
    response = get(path, method=method)
    assert response.status_code == status
    assert path in response.json()["error"]["message"]
    if status == 405:
        assert response.headers["allow"]


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer ", "secret", "Basic secret", "Bearer sécret"]
)
def test_without_the_key_every_route_but_health_is_closed(header) -> None:
    async def scenario(server: Served) -> list[int]:
        headers = {} if header is None else {"Authorization": header.encode()}
        statuses = [
            (await server.http.request(method, path, headers=headers)).status_code
            for method, path in [
                ("POST", TEXT),
                ("GET", "/v1/models"),
                ("GET", "/version"),
                ("GET", "/docs"),
                ("GET", "/openapi.json"),
                ("GET", "/no/such"),
            ]
        ]
        assert (await healthy(server)).status_code == 200
        return statuses

    assert run(scenario, api_keys=("secret",)) == [401] * 6


def test_the_key_opens_the_routes_and_the_refusal_has_openais_form() -> None:
    refused = get("/v1/models", api_keys=("secret",))
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert refused.headers["www-authenticate"] == "Bearer"
    assert get("/v1/models", api_keys=("secret",), Authorization="bearer secret").status_code == 200


def test_a_draining_server_refuses_with_503_and_says_when_to_retry() -> None:
    async def scenario(server: Served) -> tuple[httpx.Response, httpx.Response]:
        server.client.stop_accepting()
        health = await server.http.get("/health")
        return await server.http.post(TEXT, json={"prompt": "x"}), health

    refused, health = run(scenario)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    assert "shutting down" in refused.json()["error"]["message"]
    assert health.status_code == 503


def test_a_draining_server_lets_open_requests_end() -> None:
    async def scenario(server: Served) -> Any:
        task = asyncio.create_task(server.http.post(TEXT, json={"prompt": "ace", "max_tokens": 50}))
        while server.client.num_open == 0:
            await asyncio.sleep(0)
        server.client.stop_accepting()
        await server.client.wait_idle()
        return (await task).json()["usage"]["completion_tokens"]

    assert run(scenario) == 50


def test_a_failed_engine_ends_open_requests_and_refuses_new_ones() -> None:
    async def scenario(server: Served) -> tuple[httpx.Response, httpx.Response, httpx.Response]:
        server.engine.paused = True
        task = asyncio.create_task(server.http.post(TEXT, json=LONG))
        while server.client.num_open == 0:
            await asyncio.sleep(0)
        server.client.fail_all(RequestError("the scheduler process died", status=500))
        late = await server.http.post(TEXT, json=LONG)
        return await task, late, await server.http.get("/health")

    for response in run(scenario):
        assert response.status_code in (500, 503)
        assert response.json()["error"]["message"] == "the scheduler process died"


def test_a_crash_in_a_route_is_a_500_in_openais_form(monkeypatch) -> None:
    async def scenario(server: Served) -> httpx.Response:
        monkeypatch.setattr(server.client, "generate", lambda *a, **k: 1 / 0)
        return await server.http.post(TEXT, json=LONG)

    response = run(scenario)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "division" not in response.text


# Clients that leave


class LeavingClient:
    """Speaks ASGI by hand: posts a body, reads ``num_chunks`` of the answer, and hangs up."""

    def __init__(self, body: dict[str, Any], num_chunks: int) -> None:
        self._body = json.dumps(body).encode()
        self._num_chunks = num_chunks
        self._gone = asyncio.Event()
        self._sent_body = False
        self.chunks: list[bytes] = []

    def leave(self) -> None:
        self._gone.set()

    async def receive(self) -> dict[str, Any]:
        if not self._sent_body:
            self._sent_body = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body" and message["body"]:
            self.chunks.append(message["body"])
            if len(self.chunks) >= self._num_chunks:
                self.leave()
        await asyncio.sleep(0)

    async def request(self, app: Any) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": TEXT,
            "raw_path": TEXT.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        await asyncio.wait_for(app(scope, self.receive, self.send), PATIENCE)


async def all_ended(server: Served) -> None:
    for _ in range(1000):
        if server.engine.scheduler.num_running == 0 and not server.engine.transport.inbox:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the engine still runs requests of clients that are gone")


@pytest.mark.parametrize("num_chunks", [1, 2, 5])
def test_a_client_that_drops_its_stream_aborts_the_request(num_chunks) -> None:
    async def scenario(server: Served) -> None:
        client = LeavingClient({**LONG, "stream": True}, num_chunks)
        await client.request(server.app)
        assert server.client.num_open == 0
        assert server.engine.aborted == [1]
        await all_ended(server)
        assert server.engine.detokenizer.num_open == 0

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_any_answer_aborts_the_request(stream) -> None:
    async def scenario(server: Served) -> None:
        server.engine.paused = True
        client = LeavingClient({**LONG, "stream": stream}, 1)
        task = asyncio.create_task(client.request(server.app))
        while server.client.num_open == 0:
            await asyncio.sleep(0)
        client.leave()
        await task
        assert server.client.num_open == 0
        assert server.engine.aborted == [1]
        assert server.engine.forgotten == [1], "the tokenizer may not have begun"
        server.engine.paused = False
        await all_ended(server)

    run(scenario)


def test_a_question_whose_client_leaves_is_forgotten() -> None:
    async def scenario(server: Served) -> None:
        server.engine.send = lambda message: server.engine.forgotten.extend(  # type: ignore[method-assign]
            message.uids if isinstance(message, ForgetRequests) else []
        )
        asked = asyncio.create_task(server.client.tokens(lambda uid: TokenizeOnly(uid, "x")))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert server.engine.forgotten == [1]

    run(scenario, pings=False)


def test_leaving_a_batch_aborts_every_prompt_of_it() -> None:
    async def scenario(server: Served) -> None:
        body = {"prompt": ["ace", "ho"], "max_tokens": 4000, "stream": True}
        await LeavingClient(body, 3).request(server.app)
        assert sorted(server.engine.aborted) == [1, 2]
        await all_ended(server)

    run(scenario)


def test_fifty_dropped_streams_leave_nothing_behind() -> None:
    async def scenario(server: Served) -> None:
        clients = [LeavingClient({**LONG, "stream": True}, 1 + n % 3) for n in range(50)]
        await asyncio.gather(*(client.request(server.app) for client in clients))
        await all_ended(server)
        assert server.client.num_open == 0
        assert server.engine.detokenizer.num_open == 0
        assert (await server.http.post(TEXT, json={"prompt": "x"})).status_code == 200

    run(scenario)


def test_a_finished_request_is_not_aborted() -> None:
    async def scenario(server: Served) -> list[int]:
        for stream in (False, True):
            await server.http.post(TEXT, json={"prompt": "x", "stream": stream})
        return server.engine.aborted

    assert run(scenario) == []


def test_a_slow_reader_gets_the_same_text_in_fewer_chunks() -> None:
    async def scenario(server: Served) -> tuple[str, int]:
        from minisgl.request import SamplingParams

        with_params = server.client.generate(["ace"], SamplingParams(max_tokens=300))
        async with with_params as generation:
            await generation.first()
            while server.engine.scheduler.num_running or server.engine.transport.outbox:
                await asyncio.sleep(0.001)
            replies = [reply async for _, reply in generation]
        assert sum(len(reply.token_ids) for reply in replies) == 300
        return "".join(reply.text for reply in replies), len(replies)

    text, num_chunks = run(scenario)
    assert text == "ace" * 100
    assert num_chunks < 30
