"""The tokenizer and detokenizer processes: sockets around ``PromptEncoder`` and ``Detokenizer``.

A request that fails becomes an ``ErrorReply``; only ``Shutdown`` ends a worker. Importing this
module is cheap: transformers loads inside the processes.
"""

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import zmq

from minisgl.errors import SettingsError, without_messages
from minisgl.message import (
    AbortRequest,
    BackendMessage,
    DetokenizerMessage,
    ErrorReply,
    FrontendMessage,
    GenerateRequest,
    ReplyBatch,
    Shutdown,
    TextReply,
    TokenBatch,
    TokenizerMessage,
)
from minisgl.message.sockets import Addresses, PullSocket, PushSocket
from minisgl.message.status import StatusSender
from minisgl.processes import quiet_collector
from minisgl.settings import Settings
from minisgl.tokenizer.answers import answers
from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.dispatch import WorkCounter, work_of
from minisgl.tokenizer.encoding import PromptEncoder, max_chars_per_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
logger.addFilter(without_messages)

EXIT_LINGER_MS = 1000


def tokenizer_main(settings: Settings, addresses: Addresses, status: StatusSender) -> None:
    """Run the tokenizer process until ``Shutdown``.

    Raises:
        ModelLoadError: the tokenizer cannot be loaded.
    """
    status.starting("loading the tokenizer")
    _forgo_torch()
    serve_tokenizer(_load(settings), addresses, status)


def detokenizer_main(settings: Settings, addresses: Addresses, status: StatusSender) -> None:
    """Run the detokenizer process until ``Shutdown``.

    Raises:
        ModelLoadError: the tokenizer cannot be loaded.
    """
    status.starting("loading the tokenizer")
    _forgo_torch()
    serve_detokenizer(_load(settings), addresses, status)


def serve_tokenizer(
    tokenizer: "PreTrainedTokenizerBase", addresses: Addresses, status: StatusSender
) -> None:
    """Tokenise requests until ``Shutdown``."""
    encoder = PromptEncoder(tokenizer)
    with _Wires(addresses, addresses.tokenizer, TokenizerMessage) as wires:
        status.num_dropped = lambda: wires.inbox.num_dropped
        quiet_collector()
        status.ready(
            {
                "chat_template": encoder.chat.source,
                "max_chars_per_token": max_chars_per_token(tokenizer),
            }
        )
        done = WorkCounter(addresses.tokenizer_work)
        while True:
            waiting = wires.inbox.receive(None)
            asked = [message for message in waiting if not isinstance(message, Shutdown)]
            for message, reply in answers(encoder, asked):
                if isinstance(reply, GenerateRequest):
                    wires.scheduler.send(reply)
                else:
                    wires.frontend.send(reply)
                done.add(work_of(message))
            if len(asked) < len(waiting):
                return


def serve_detokenizer(
    tokenizer: "PreTrainedTokenizerBase", addresses: Addresses, status: StatusSender
) -> None:
    """Turn steps of tokens into text until ``Shutdown``."""
    detokenizer = Detokenizer(tokenizer)
    with _Wires(addresses, addresses.detokenizer, DetokenizerMessage) as wires:
        status.num_dropped = lambda: wires.inbox.num_dropped
        quiet_collector()
        status.ready()
        while True:
            for message in wires.inbox.receive(None):
                if isinstance(message, Shutdown):
                    return
                _detokenize(detokenizer, message, wires)


class _Wires:
    """The sockets of one worker; what is queued at the end gets a second to leave."""

    def __init__(self, addresses: Addresses, own: str, message_type: Any) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.inbox: PullSocket[Any] = PullSocket(self._context, own, message_type)
        self.scheduler: PushSocket[BackendMessage] = PushSocket(
            self._context, addresses.scheduler, BackendMessage
        )
        self.frontend: PushSocket[FrontendMessage] = PushSocket(
            self._context, addresses.frontend, FrontendMessage
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.inbox.close()
        self.scheduler.close(EXIT_LINGER_MS)
        self.frontend.close(EXIT_LINGER_MS)
        self._context.term()


def _detokenize(detokenizer: Detokenizer, batch: TokenBatch, wires: _Wires) -> None:
    """Process one step, and tell the API server and the scheduler what follows from it."""
    try:
        replies, stops = detokenizer.process(batch)
    except Exception:
        logger.exception("dropped a step of tokens that do not fit together")
        _fail(batch, wires)
        return
    for stop in stops:
        wires.scheduler.send(stop)
    texts = [reply for reply in replies if isinstance(reply, TextReply)]
    if texts:
        wires.frontend.send(ReplyBatch(texts))
    for reply in replies:
        if isinstance(reply, ErrorReply):
            wires.frontend.send(reply)


def _forgo_torch() -> None:
    """Let transformers find no torch in this process: tokenizers do without its 0.2 GB."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # as documented: it is not found
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


def _load(settings: Settings) -> "PreTrainedTokenizerBase":
    """Return the tokenizer that the settings name: its own, or the model's."""
    from minisgl.tokenizer.loading import load_tokenizer

    path = settings.model.tokenizer or settings.model.path
    if path is None:
        raise SettingsError("no model is given; type --model PATH")
    return load_tokenizer(Path(path))


def _fail(batch: TokenBatch, wires: _Wires) -> None:
    """End every request of a step that cannot be read: none may wait for tokens that are lost."""
    whole = len(batch.uids) // 8 * 8
    uids = {start.uid for start in batch.started} | set(batch.finished_uids)
    uids.update(np.frombuffer(batch.uids[:whole], dtype="<i8").tolist())
    for uid in sorted(uids):
        wires.frontend.send(ErrorReply(uid, "the tokens of this answer were lost", status=500))
    if uids:
        wires.scheduler.send(AbortRequest(sorted(uids)))
