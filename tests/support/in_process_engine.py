"""The whole text path in one event loop: real tokenizing and detokenizing, an echoing engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from minisgl.message import (
    AbortRequest,
    DetokenizeOnly,
    ErrorReply,
    ForgetRequests,
    FrontendMessage,
    ReplyBatch,
    TextReply,
    TokenizeOnly,
    TokenizeRequest,
    TokensReply,
)
from minisgl.plugins.parsers import AnswerParsers
from minisgl.scheduler.transport import MemoryTransport
from minisgl.server.app import create_app
from minisgl.server.client import ClientLimits, EngineClient
from minisgl.server.served_model import ServedModel
from minisgl.tokenizer.answers import answer
from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.encoding import PromptEncoder, max_chars_per_token
from support.fake_scheduler import MAX_SEQ_LEN, EchoScheduler
from support.text_tokenizers import byte_level

MODEL = "org/fake-model"


class _Transport(MemoryTransport):
    """Also keeps heartbeats."""

    def __init__(self) -> None:
        super().__init__()
        self.pongs: list[FrontendMessage] = []

    def pong(self, message: Any) -> None:
        self.pongs.append(message)


@dataclass
class InProcessEngine:
    """What ``EngineClient`` talks to; ``paused`` makes the engine stand still."""

    transport: _Transport = field(default_factory=_Transport)
    aborted: list[int] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    requests: list[TokenizeRequest] = field(default_factory=list)
    paused: bool = False
    chat_template: str | None = None
    tokenizer: Any = None

    def __post_init__(self) -> None:
        tokenizer = self.tokenizer or byte_level()
        if self.chat_template is not None:
            tokenizer.chat_template = self.chat_template
        self.encoder = PromptEncoder(tokenizer)
        self.detokenizer = Detokenizer(tokenizer)
        self.scheduler = EchoScheduler(self.transport, {})
        self._errors: list[ErrorReply | TokensReply] = []

    def send(self, message: Any) -> None:
        """Take what the client sends to the tokenizer or to the scheduler."""
        if isinstance(message, TokenizeRequest | TokenizeOnly | DetokenizeOnly):
            if isinstance(message, TokenizeRequest):
                self.requests.append(message)
            message = answer(self.encoder, message)
        if isinstance(message, ForgetRequests):  # it answers at once, so there is nothing left
            self.forgotten += message.uids
            return
        if isinstance(message, AbortRequest):
            self.aborted += message.uids
        if isinstance(message, ErrorReply | TokensReply):
            self._errors.append(message)
        else:
            self.transport.inbox.append(message)

    async def receive(self) -> list[FrontendMessage]:
        """Step until there is something to tell the client."""
        while True:
            await asyncio.sleep(0)
            if not self.paused:
                self.scheduler.turn()
            found = [*self.transport.pongs, *self._errors, *self._replies()]
            self.transport.pongs.clear()
            self._errors.clear()
            if found:
                return found
            await asyncio.sleep(0.001)

    def _replies(self) -> list[FrontendMessage]:
        found: list[FrontendMessage] = []
        for batch in self.transport.outbox:
            replies, stops = self.detokenizer.process(batch)
            self.transport.inbox.extend(stops)
            found.append(ReplyBatch([r for r in replies if isinstance(r, TextReply)]))
            found += [r for r in replies if isinstance(r, ErrorReply)]
        self.transport.outbox.clear()
        return found


@dataclass
class Served:
    """An application around an in-process engine, and a client for it."""

    engine: InProcessEngine
    client: EngineClient
    app: Any
    http: httpx.AsyncClient


@contextlib.asynccontextmanager
async def served(
    *,
    pings: bool = True,
    chat_template: str | None = None,
    parsers: AnswerParsers | None = None,
    limits: ClientLimits | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """Yield a running application; checks at the end that no request was forgotten."""
    engine = InProcessEngine(chat_template=chat_template, tokenizer=tokenizer)
    client = EngineClient(tokenizer=engine, scheduler=engine, replies=engine, limits=limits)
    model = ServedModel(MODEL, MAX_SEQ_LEN, max_chars_per_token(byte_level()))
    model.parsers = parsers or AnswerParsers()
    app = create_app(client, model, **options)
    tasks = [asyncio.create_task(client.listen())]
    if pings:
        tasks.append(asyncio.create_task(client.heartbeat.ping()))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        yield Served(engine, client, app, http)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert client.num_open == 0
