"""What the world around a server may do to it: a full disk, a clock that jumps."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.in_process_engine import Served, served
from support.patience import PATIENCE
from support.server_process import free_port, get, post, wait_for
from support.tiny_models import write_tiny_model

TEXT = "/v1/completions"


@pytest.fixture(params=["", "1"], ids=["buffered", "unbuffered"])
def buffering(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Python keep output for a while, or not: what it kept it writes at its end."""
    monkeypatch.setenv("PYTHONUNBUFFERED", request.param)


@pytest.mark.slow
@pytest.mark.usefixtures("buffering")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_a_disk_without_room_for_logs_stops_nothing(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", "Qwen3ForCausalLM")
    port = free_port()
    command = [sys.executable, "-m", "minisgl", "serve", str(model), "--port", str(port)]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        server = subprocess.Popen([*command, "--log-level", "debug"], stdout=full, stderr=full)
    try:
        health = f"http://127.0.0.1:{port}/health"
        wait_for(lambda: get(health).status_code == httpx.codes.OK, "the server")
        body = {"prompt": "abc", "max_tokens": 3, "unknown": 1}
        answers = [post(f"http://127.0.0.1:{port}{TEXT}", json=body) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [httpx.codes.OK] * 3
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
    finally:
        server.kill()
        server.wait()


@pytest.mark.usefixtures("buffering")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_a_disk_without_room_for_the_error_changes_no_exit_code() -> None:
    command = [sys.executable, "-m", "minisgl", "serve", "--model", "/no/such/model", "--port", "0"]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        assert subprocess.run(command, stdout=full, stderr=full, check=False).returncode == 4


@pytest.mark.parametrize("jump", [-(10.0**9), 10.0**9])
def test_a_clock_that_jumps_ends_nothing(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    now, jumped = time.time, False

    async def scenario(server: Served) -> list[Any]:
        nonlocal jumped
        while (await server.http.get("/health")).status_code != httpx.codes.OK:
            await asyncio.sleep(0.01)
        body = {"prompt": "ace", "max_tokens": 50, "stream": True, "timeout": 600}
        async with server.http.stream("POST", TEXT, json=body) as response:
            jumped = True
            text = (await response.aread()).decode()
        whole = await server.http.post(TEXT, json={**body, "stream": False})
        return [text, whole, await server.http.get("/health")]

    async def main() -> list[Any]:
        async with served() as server:
            return await asyncio.wait_for(scenario(server), PATIENCE)

    monkeypatch.setattr(time, "time", lambda: now() + jump * jumped)
    text, whole, health = asyncio.run(main())
    assert text.endswith("data: [DONE]\n\n")
    assert whole.json()["choices"][0]["finish_reason"] == "length"
    assert health.status_code == httpx.codes.OK


def test_only_dates_that_people_see_come_from_the_clock() -> None:
    """Every duration and deadline is measured by a clock that never jumps."""
    source = Path(sys.modules["minisgl"].__file__ or "").parent
    dates = {"server/served_model.py", "server/openai/answer.py", "server/responses/answer.py"}
    found = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if "time.time(" in path.read_text(encoding="utf-8")
    }
    assert found == dates
