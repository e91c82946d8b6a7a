"""Whatever arrives at a socket between processes: no crash, no wrong answer, and it is counted.

Random bytes are no message. Mutated messages may be: what decodes has the right types and sizes,
and then no value of it may end a process or another request.
"""

import asyncio
import contextlib
import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from minisgl.message import (
    AbortRequest,
    BackendMessage,
    Codec,
    DecodeError,
    DetokenizerMessage,
    ErrorReply,
    FrontendMessage,
    GenerateRequest,
    LogprobBatch,
    Ping,
    Pong,
    PromptLogprobs,
    ReplyBatch,
    Shutdown,
    StopFound,
    StreamStart,
    TextReply,
    TokenBatch,
    TokenizeOnly,
    TokenizeRequest,
    TokenizerMessage,
    TokensReply,
)
from minisgl.request import GrammarSpec, SamplingParams
from minisgl.server.client import EngineClient
from minisgl.tokenizer import worker
from minisgl.tokenizer.answers import answers
from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.encoding import PromptEncoder
from support.fake_engine import generate
from support.scheduling import Harness
from support.server_process import get, post, running_server, wait_for
from support.text_tokenizers import byte_level

PARAMS = SamplingParams(
    max_tokens=5, stop=("x",), logit_bias={3: 1.0}, seed=7, grammar=GrammarSpec("grammar", "1:2")
)
LOGPROBS = LogprobBatch(b"\0" * 4, b"\1\0\0\0", b"\0" * 4, b"\1\0\0\0", b"\5\0\0\0", b"\0" * 4)
TOKENS = TokenBatch(
    started=[StreamStart(1, 2, PARAMS, prompt_token_ids=b"\5\0\0\0" * 2, prompt_tail="x")],
    uids=(1).to_bytes(8, "little") * 2,
    token_ids=b"\5\0\0\0\6\0\0\0",
    finished_uids=[1],
    finish_reasons=["stop"],
    num_cached_tokens=[0],
    failures=[None],
    logprobs=LOGPROBS,
    prompt_logprobs=[PromptLogprobs(1, LOGPROBS)],
)
MESSAGES: dict[str, tuple[Any, list[Any]]] = {
    "scheduler": (
        BackendMessage,
        [
            GenerateRequest(1, b"\2\0\0\0\3\0\0\0", PARAMS, 1, "salt", "tail"),
            AbortRequest([1, 2]),
            StopFound(1, 2),
            Ping(3),
        ],
    ),
    "tokenizer": (
        TokenizerMessage,
        [
            TokenizeRequest(1, "text", PARAMS, tools=[{"type": "function"}]),
            TokenizeRequest(
                2, [{"role": "user", "content": "text"}], PARAMS, template_kwargs={"a": 1}
            ),
            TokenizeOnly(3, [5, 6]),
        ],
    ),
    "detokenizer": (DetokenizerMessage, [TOKENS]),
    "frontend": (
        FrontendMessage,
        [
            ReplyBatch([TextReply(1, "text", [5], "stop", 2, 1)]),
            ErrorReply(1, "wrong", 400, "prompt", "code"),
            Pong(1, 2, 3, 4, 5, 6),
            TokensReply(1, [5], "text"),
        ],
    ),
}

NASTY = st.one_of(
    st.sampled_from([-(2**63), -1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1]),
    st.sampled_from([float("nan"), float("inf"), -0.5, 1e308]),
    st.sampled_from([None, True, "", "x", "\0", "a" * 2000, [], {}, [[]], {"": None}]),
    st.sampled_from([b"", b"\xff", b"\xff" * 8, b"\0" * 12]),
    st.recursive(
        st.none() | st.integers(-5, 5) | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        ),
        max_leaves=6,
    ),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values inside ``value``."""
    found = [path]
    inside = dict(enumerate(value)) if isinstance(value, list) else value
    for key, inner in inside.items() if isinstance(inside, dict) else ():
        found += places(inner, (*path, key))
    return found


@st.composite
def mutated(draw: st.DrawFn, receiver: str) -> bytes:
    """A valid message of a receiver in which some values were replaced, or some bytes."""
    whole = msgspec.msgpack.encode(draw(st.sampled_from(MESSAGES[receiver][1])))
    if draw(st.booleans()):
        data = bytearray(whole)
        for _ in range(draw(st.integers(1, 4))):
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)
    value = msgspec.msgpack.decode(whole)
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from([path for path in places(value) if path]))
        target = value
        for key in way:
            target = target[key]
        if not isinstance(target, dict | list) or (
            isinstance(target, list) and last >= len(target)
        ):
            continue
        target[last] = copy.deepcopy(draw(NASTY))
    return msgspec.msgpack.encode(value)


def decoded(receiver: str, data: bytes) -> list[Any]:
    """Return what a receiver would get, ``Shutdown`` aside: that is an order, and no fault."""
    codec: Codec[Any] = Codec(MESSAGES[receiver][0])
    try:
        message = codec.decode(data)
    except DecodeError:
        return []
    return [] if isinstance(message, Shutdown) else [message]


@pytest.mark.parametrize("receiver", MESSAGES)
@given(data=st.data())
def test_bytes_decode_to_a_message_or_to_a_decode_error(receiver: str, data: st.DataObject) -> None:
    codec: Codec[Any] = Codec(MESSAGES[receiver][0])
    for blob in (data.draw(st.binary(max_size=200)), data.draw(mutated(receiver))):
        with contextlib.suppress(DecodeError):
            codec.decode(blob)


@given(st.lists(mutated("scheduler"), max_size=6), st.booleans())
def test_the_scheduler_outlives_every_message(blobs: list[bytes], overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    harness.submit(77, [2, 3], max_tokens=6)
    for blob in blobs:
        harness.transport.inbox += decoded("scheduler", blob)
        harness.scheduler.receive(0)
        harness.scheduler.step()
        harness.scheduler.check()
    harness.transport.inbox.append(
        GenerateRequest(78, b"\2\0\0\0", SamplingParams(max_tokens=3, temperature=0))
    )
    for _ in range(2000):
        harness.scheduler.receive(0)
        harness.scheduler.step()
        if not harness.scheduler.has_work:
            break
    assert not harness.scheduler.has_work
    assert harness.scheduler.num_queued_tokens == 0
    tokens = {77: [], 78: []}
    for batch in harness.transport.outbox:
        uids = memoryview(batch.uids).cast("q")
        for uid, token in zip(uids, memoryview(batch.token_ids).cast("i"), strict=True):
            tokens.setdefault(uid, []).append(token)
    if not any(_touches(blob, 78) for blob in blobs):
        assert tokens[78] == generate([2], 3)


def _touches(blob: bytes, uid: int) -> bool:
    """Whether a message that decodes is about ``uid``: an abort may come before its request."""
    for message in decoded("scheduler", blob):
        named = message.uids if isinstance(message, AbortRequest) else [getattr(message, "uid", -1)]
        if uid in named:
            return True
    return False


class Sink:
    """A socket whose messages must be ones that its receiver can read."""

    def send(self, message: Any) -> None:
        msgspec.msgpack.encode(message)


@given(st.lists(mutated("detokenizer"), max_size=4))
def test_the_detokenizer_outlives_every_message(blobs: list[bytes]) -> None:
    detokenizer = Detokenizer(byte_level())
    wires: Any = SimpleNamespace(scheduler=Sink(), frontend=Sink())
    for blob in blobs:
        for batch in decoded("detokenizer", blob):
            worker._detokenize(detokenizer, batch, wires)
    start = StreamStart(900, 1, SamplingParams())
    uids = (900).to_bytes(8, "little")
    token = byte_level().encode("a")[0].to_bytes(4, "little")
    last = TokenBatch([start], uids, token, [900], ["length"], [0], [None])
    replies, _ = detokenizer.process(last)
    assert "".join(reply.text for reply in replies) == "a"


@given(st.lists(mutated("tokenizer"), max_size=4))
def test_the_tokenizer_answers_every_message(blobs: list[bytes]) -> None:
    encoder = PromptEncoder(byte_level())
    asked = [message for blob in blobs for message in decoded("tokenizer", blob)]
    assert len(list(answers(encoder, asked))) == len(asked)


@given(st.lists(mutated("frontend"), max_size=6))
def test_the_api_server_outlives_every_message(blobs: list[bytes]) -> None:
    class Wire:
        def __init__(self) -> None:
            self.sent: list[Any] = []
            self.arrived: asyncio.Queue[list[Any]] = asyncio.Queue()

        def send(self, message: Any) -> None:
            self.sent.append(message)

        async def receive(self) -> list[Any]:
            return await self.arrived.get()

    async def scenario() -> str:
        wire = Wire()
        client = EngineClient(tokenizer=wire, scheduler=wire, replies=wire)
        listening = asyncio.create_task(client.listen())
        for _ in range(5):  # the messages above are about request 1
            client.generate(["x"], SamplingParams()).close()
        for blob in blobs:
            wire.arrived.put_nowait(decoded("frontend", blob))
        async with client.generate(["text"], SamplingParams()) as generation:
            [uid] = generation.uids
            wire.arrived.put_nowait([ReplyBatch([TextReply(uid, "fine", [5], "stop")])])
            text = "".join([reply.text async for _, reply in generation])
        client.heartbeat.load()
        client.why_unhealthy()
        assert not listening.done()
        listening.cancel()
        return text

    assert asyncio.run(scenario()) == "fine"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_garbage_on_every_socket_of_a_server_is_dropped_and_counted(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    blobs = [b"", b"\0", b"garbage" * 100, b"\x80\x04\x95K", msgspec.msgpack.encode({"type": "no"})]
    with running_server(model, tmp_path) as server:
        server.wait_ready()
        [folder] = [path for path in server.temporary.iterdir() if path.is_dir()]
        sockets = {path.name.partition(".")[0]: path for path in folder.glob("*.ipc")}
        assert set(sockets) == set(MESSAGES)
        context = zmq.Context()
        for path in sockets.values():
            with context.socket(zmq.PUSH) as push:
                push.connect(f"ipc://{path}")
                for blob in blobs:
                    push.send(blob)
                push.send_multipart(blobs)
        context.term()

        def counted() -> dict[str, float]:
            lines = get(f"{server.url}/metrics").text.splitlines()
            name = "minisgl:dropped_messages_total{process="
            return {
                line.split('"')[1]: float(line.split()[-1])
                for line in lines
                if line.startswith(name)
            }

        processes = ("api", "scheduler", "tokenizer", "detokenizer")
        expected = dict.fromkeys(processes, 2.0 * len(blobs))
        wait_for(lambda: counted() == expected, "the counters")
        body = {"prompt": "abc", "max_tokens": 3}
        answer = post(f"{server.url}/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == "abc"
