"""Typed sockets and the codec: what arrives is what was sent, and garbage never gets through."""

import asyncio
import logging
import os
import pickle
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from minisgl.message import (
    AbortRequest,
    BackendMessage,
    Codec,
    DecodeError,
    FrontendMessage,
    GenerateRequest,
    Ping,
    Pong,
    TokenizeRequest,
    TokenizerMessage,
)
from minisgl.message.sockets import (
    Addresses,
    AsyncPullSocket,
    PullSocket,
    PushSocket,
    private_addresses,
)
from minisgl.request import SamplingParams
from support.patience import PATIENCE


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def addresses() -> Iterator[Addresses]:
    with private_addresses() as addresses:
        yield addresses


def directory_of(addresses: Addresses) -> Path:
    return Path(addresses.scheduler.removeprefix("ipc://")).parent


def test_a_killed_process_leaves_no_directory(tmp_path: Path) -> None:
    """Nobody of its group helps, and no later server."""
    code = (
        "import os, signal\n"
        "from minisgl.message.sockets import private_addresses\n"
        "with private_addresses() as addresses:\n"
        "    print(addresses.scheduler, flush=True)\n"
        "    os.killpg(0, signal.SIGKILL)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    left = Path(done.stdout.strip().removeprefix("ipc://")).parent
    assert left.parent == tmp_path
    deadline = time.monotonic() + PATIENCE
    while left.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert list(tmp_path.iterdir()) == []


def test_what_is_left_all_the_same_goes_with_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "minisgl-left"
    left.mkdir()
    (left / "lock").touch()
    foreign = tmp_path / "minisgl-of-somebody-else"
    foreign.mkdir()
    with private_addresses() as other:
        assert not left.exists()
        with private_addresses():
            assert directory_of(other).is_dir(), "one that is in use stays"
    assert list(tmp_path.iterdir()) == [foreign]


def test_a_machine_without_a_shell_has_its_directories_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with private_addresses() as addresses:
        assert directory_of(addresses).is_dir()
    assert not directory_of(addresses).exists()


def test_messages_arrive_in_order_and_whole(context, addresses) -> None:
    inbox = PullSocket(context, addresses.scheduler, BackendMessage)
    sender = PushSocket(context, addresses.scheduler, BackendMessage)
    sent = [
        Ping(1),
        GenerateRequest(2, b"\1\0\0\0", SamplingParams(stop=("x",))),
        AbortRequest([2]),
    ]
    for message in sent:
        sender.send(message)
    received = []
    while len(received) < len(sent):
        received += inbox.receive(PATIENCE)
    assert received == sent
    inbox.close()
    sender.close()


def test_a_sender_may_connect_before_the_receiver_exists(context, addresses) -> None:
    sender = PushSocket(context, addresses.scheduler, BackendMessage)
    sender.send(Ping(7))
    inbox = PullSocket(context, addresses.scheduler, BackendMessage)
    assert inbox.receive(PATIENCE) == [Ping(7)]
    inbox.close()
    sender.close()


def test_receive_without_waiting_returns_nothing_when_nothing_is_there(context, addresses) -> None:
    inbox = PullSocket(context, addresses.scheduler, BackendMessage)
    assert inbox.receive(0) == []
    inbox.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xc1",
        pickle.dumps({"uid": 1}),
        msgspec.msgpack.encode({"type": "pong", "sequence": 1}),
        msgspec.msgpack.encode({"type": "generate", "uid": "one", "token_ids": b"", "params": {}}),
        msgspec.msgpack.encode(
            {"type": "generate", "uid": 1, "token_ids": b"", "params": {"temperature": -1}}
        ),
    ],
    ids=["empty", "malformed", "pickle", "other group", "wrong type", "invalid params"],
)
def test_garbage_is_dropped_and_counted_with_one_warning(
    context, addresses, garbage, caplog
) -> None:
    inbox = PullSocket(context, addresses.scheduler, BackendMessage)
    raw = context.socket(zmq.PUSH)
    raw.connect(addresses.scheduler)
    sender = PushSocket(context, addresses.scheduler, BackendMessage)
    with caplog.at_level(logging.WARNING):
        raw.send(garbage)
        raw.send(garbage)
        while inbox.num_dropped < 2:
            assert inbox.receive(PATIENCE) == []
    sender.send(Ping(3))
    assert inbox.receive(PATIENCE) == [Ping(3)]
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    raw.close(linger=0)
    sender.close()
    inbox.close()


def test_async_receiver_gets_messages_sent_from_its_own_loop(addresses) -> None:
    async def exchange() -> list[FrontendMessage]:
        context = zmq.asyncio.Context()
        plain = zmq.Context.shadow(context.underlying)
        inbox = AsyncPullSocket(context, addresses.frontend, FrontendMessage)
        sender = PushSocket(plain, addresses.frontend, FrontendMessage)
        received: list[FrontendMessage] = []
        for sequence in range(50):
            sender.send(Pong(sequence, 0, 0, 0, 0, 0))
            if sequence % 10 == 9:
                received += await asyncio.wait_for(inbox.receive(), PATIENCE)
        while len(received) < 50:
            received += await asyncio.wait_for(inbox.receive(), PATIENCE)
        sender.close()
        inbox.close()
        context.destroy(linger=0)
        return received

    received = asyncio.run(exchange())
    assert [message.sequence for message in received] == list(range(50))


def test_addresses_lie_in_a_private_directory_that_is_removed() -> None:
    with private_addresses() as one, private_addresses() as other:
        directory = directory_of(one)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert directory != directory_of(other)
        assert len({one.frontend, one.tokenizer, one.scheduler, one.detokenizer}) == 4
    assert not directory.exists()


def test_a_long_temporary_path_still_gives_usable_addresses(context, tmp_path, monkeypatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with private_addresses() as addresses:
        inbox = PullSocket(context, addresses.scheduler, BackendMessage)
        assert inbox.receive(0) == []
        inbox.close()


@pytest.mark.parametrize(
    "prompt",
    ["text", [1, 2, 3], [{"role": "user", "content": [{"type": "text", "text": "x"}]}]],
)
def test_every_kind_of_prompt_survives_the_wire(prompt) -> None:
    codec: Codec[TokenizerMessage] = Codec(TokenizerMessage)
    request = TokenizeRequest(1, prompt, SamplingParams(stop_token_ids=(3,)), priority=2)
    assert codec.decode(codec.encode(request)) == request


def test_values_that_break_the_params_rules_are_a_decode_error() -> None:
    codec: Codec[BackendMessage] = Codec(BackendMessage)
    data = msgspec.msgpack.encode(
        {"type": "generate", "uid": 1, "token_ids": b"", "params": {"max_tokens": 0}}
    )
    with pytest.raises(DecodeError, match="max_tokens"):
        codec.decode(data)
