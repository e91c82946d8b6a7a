"""The tokenizer and detokenizer processes: sockets around ``PromptEncoder`` and ``Detokenizer``.

A request that fails becomes an ``ErrorReply``; only ``Shutdown`` ends a worker. Importing this
module is cheap: transformers loads inside the processes.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import zmq

from minisgl.errors import RequestError, SettingsError
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
    TokenizeRequest,
    TokenizerMessage,
)
from minisgl.message.sockets import Addresses, PullSocket, PushSocket
from minisgl.message.status import StatusSender
from minisgl.settings import Settings
from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.encoding import PromptEncoder, max_chars_per_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

EXIT_LINGER_MS = 1000


def tokenizer_main(settings: Settings, addresses: Addresses, status: StatusSender) -> None:
    """Run the tokenizer process until ``Shutdown``.

    Raises:
        ModelLoadError: the tokenizer cannot be loaded.
    """
    status.starting("loading the tokenizer")
    serve_tokenizer(_load(settings), addresses, status)


def detokenizer_main(settings: Settings, addresses: Addresses, status: StatusSender) -> None:
    """Run the detokenizer process until ``Shutdown``.

    Raises:
        ModelLoadError: the tokenizer cannot be loaded.
    """
    status.starting("loading the tokenizer")
    serve_detokenizer(_load(settings), addresses, status)


def serve_tokenizer(
    tokenizer: "PreTrainedTokenizerBase", addresses: Addresses, status: StatusSender
) -> None:
    """Tokenise requests until ``Shutdown``."""
    encoder = PromptEncoder(tokenizer)
    with _Wires(addresses, addresses.tokenizer, TokenizerMessage) as wires:
        status.ready(
            {
                "chat_template": bool(tokenizer.chat_template),
                "max_chars_per_token": max_chars_per_token(tokenizer),
            }
        )
        while True:
            for message in wires.inbox.receive(None):
                if isinstance(message, Shutdown):
                    return
                answer = tokenize(encoder, message)
                if isinstance(answer, ErrorReply):
                    wires.frontend.send(answer)
                else:
                    wires.scheduler.send(answer)


def serve_detokenizer(
    tokenizer: "PreTrainedTokenizerBase", addresses: Addresses, status: StatusSender
) -> None:
    """Turn steps of tokens into text until ``Shutdown``."""
    detokenizer = Detokenizer(tokenizer)
    with _Wires(addresses, addresses.detokenizer, DetokenizerMessage) as wires:
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


def tokenize(encoder: PromptEncoder, request: TokenizeRequest) -> GenerateRequest | ErrorReply:
    """Return the tokenised request, or why it is refused; never raises."""
    try:
        token_ids = encoder.encode(
            request.prompt,
            add_special_tokens=request.add_special_tokens,
            template_kwargs=request.template_kwargs,
            add_generation_prompt=request.add_generation_prompt,
        )
    except RequestError as error:
        return ErrorReply(request.uid, error.message, error.status, error.param, error.code)
    except Exception:
        logger.exception("cannot tokenise request %d", request.uid)
        return ErrorReply(request.uid, "the prompt could not be tokenised", status=500)
    return GenerateRequest(
        request.uid,
        np.asarray(token_ids, dtype="<i4").tobytes(),
        request.params,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


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
