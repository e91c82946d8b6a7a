"""The tokenizer and detokenizer processes: sockets around ``PromptEncoder`` and ``Detokenizer``.

A request that fails becomes an ``ErrorReply``; only ``Shutdown`` ends a worker. Importing this
module is cheap: transformers loads inside the processes.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import zmq

from minisgl.errors import RequestError, SettingsError
from minisgl.message import (
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

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from minisgl.tokenizer.detokenizer import Detokenizer
    from minisgl.tokenizer.encoding import PromptEncoder

logger = logging.getLogger(__name__)

EXIT_LINGER_MS = 1000


def tokenizer_main(settings: Settings, addresses: Addresses, status: StatusSender) -> None:
    """Run the tokenizer process until ``Shutdown``.

    Raises:
        ModelLoadError: the tokenizer cannot be loaded.
    """
    status.starting("loading the tokenizer")
    from minisgl.tokenizer.encoding import PromptEncoder

    tokenizer = _load(settings)
    encoder = PromptEncoder(tokenizer)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: PullSocket[TokenizerMessage] = PullSocket(context, addresses.tokenizer, TokenizerMessage)
    scheduler: PushSocket[BackendMessage] = PushSocket(context, addresses.scheduler, BackendMessage)
    frontend: PushSocket[FrontendMessage] = PushSocket(context, addresses.frontend, FrontendMessage)
    status.ready({"chat_template": bool(tokenizer.chat_template)})
    while True:
        for message in inbox.receive(None):
            if isinstance(message, Shutdown):
                inbox.close()
                scheduler.close(EXIT_LINGER_MS)
                frontend.close(EXIT_LINGER_MS)
                context.term()
                return
            answer = tokenize(encoder, message)
            if isinstance(answer, ErrorReply):
                frontend.send(answer)
            else:
                scheduler.send(answer)


def detokenizer_main(settings: Settings, addresses: Addresses, status: StatusSender) -> None:
    """Run the detokenizer process until ``Shutdown``.

    Raises:
        ModelLoadError: the tokenizer cannot be loaded.
    """
    status.starting("loading the tokenizer")
    from minisgl.tokenizer.detokenizer import Detokenizer

    detokenizer = Detokenizer(_load(settings))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: PullSocket[DetokenizerMessage] = PullSocket(
        context, addresses.detokenizer, DetokenizerMessage
    )
    scheduler: PushSocket[BackendMessage] = PushSocket(context, addresses.scheduler, BackendMessage)
    frontend: PushSocket[FrontendMessage] = PushSocket(context, addresses.frontend, FrontendMessage)
    status.ready()
    while True:
        for message in inbox.receive(None):
            if isinstance(message, Shutdown):
                inbox.close()
                scheduler.close(EXIT_LINGER_MS)
                frontend.close(EXIT_LINGER_MS)
                context.term()
                return
            _detokenize(detokenizer, message, frontend, scheduler)


def tokenize(encoder: "PromptEncoder", request: TokenizeRequest) -> GenerateRequest | ErrorReply:
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
    )


def _detokenize(
    detokenizer: "Detokenizer",
    batch: TokenBatch,
    frontend: PushSocket[FrontendMessage],
    scheduler: PushSocket[BackendMessage],
) -> None:
    """Process one step, and tell the API server and the scheduler what follows from it."""
    try:
        replies, stops = detokenizer.process(batch)
    except Exception:
        logger.exception("dropped a step of tokens that do not fit together")
        return
    for stop in stops:
        scheduler.send(stop)
    texts = [reply for reply in replies if isinstance(reply, TextReply)]
    if texts:
        frontend.send(ReplyBatch(texts))
    for reply in replies:
        if isinstance(reply, ErrorReply):
            frontend.send(reply)


def _load(settings: Settings) -> "PreTrainedTokenizerBase":
    """Return the tokenizer that the settings name: its own, or the model's."""
    from minisgl.tokenizer.loading import load_tokenizer

    path = settings.model.tokenizer or settings.model.path
    if path is None:
        raise SettingsError("no model is given; type --model PATH")
    return load_tokenizer(Path(path))
