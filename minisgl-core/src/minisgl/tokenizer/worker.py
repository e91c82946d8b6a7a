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
    DetokenizeOnly,
    DetokenizerMessage,
    ErrorReply,
    FrontendMessage,
    GenerateRequest,
    ReplyBatch,
    Shutdown,
    TextReply,
    TokenBatch,
    TokenizeOnly,
    TokenizeRequest,
    TokenizerMessage,
    TokensReply,
)
from minisgl.message.sockets import Addresses, PullSocket, PushSocket
from minisgl.message.status import StatusSender
from minisgl.processes import quiet_collector
from minisgl.settings import Settings
from minisgl.tokenizer.chat import ChatOptions
from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.encoding import PromptEncoder, is_chat, max_chars_per_token

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
        quiet_collector()
        status.ready(
            {
                "chat_template": encoder.chat.source,
                "max_chars_per_token": max_chars_per_token(tokenizer),
            }
        )
        while True:
            for message in wires.inbox.receive(None):
                if isinstance(message, Shutdown):
                    return
                reply = answer(encoder, message)
                if isinstance(reply, GenerateRequest):
                    wires.scheduler.send(reply)
                else:
                    wires.frontend.send(reply)


def serve_detokenizer(
    tokenizer: "PreTrainedTokenizerBase", addresses: Addresses, status: StatusSender
) -> None:
    """Turn steps of tokens into text until ``Shutdown``."""
    detokenizer = Detokenizer(tokenizer)
    with _Wires(addresses, addresses.detokenizer, DetokenizerMessage) as wires:
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


def answer(
    encoder: PromptEncoder, message: TokenizeRequest | TokenizeOnly | DetokenizeOnly
) -> GenerateRequest | TokensReply | ErrorReply:
    """Return the tokenised request, the tokens or text that were asked for, or why not.

    Never raises.
    """
    try:
        if isinstance(message, DetokenizeOnly):
            return detokenize(encoder, message)
        return tokenize(encoder, message)
    except RequestError as error:
        return ErrorReply(message.uid, error.message, error.status, error.param, error.code)
    except Exception:
        logger.exception("cannot tokenise request %d", message.uid)
        what = "tokens" if isinstance(message, DetokenizeOnly) else "prompt"
        return ErrorReply(message.uid, f"the {what} could not be tokenised", status=500)


def tokenize(
    encoder: PromptEncoder, message: TokenizeRequest | TokenizeOnly
) -> GenerateRequest | TokensReply:
    """Return the request for the scheduler, or the tokens if nothing else was asked for.

    Raises:
        RequestError: the prompt, or a word of ``bad_words``, cannot be encoded.
    """
    options = ChatOptions(
        tools=message.tools,
        template_kwargs=message.template_kwargs,
        add_generation_prompt=message.add_generation_prompt,
        continue_final_message=message.continue_final_message,
    )
    tail = ""
    if is_chat(message.prompt):
        rendered = encoder.chat.render(message.prompt, options)
        token_ids = encoder.encode_rendered(rendered)
        if isinstance(message, TokenizeRequest) and message.return_prompt_tail:
            tail = encoder.chat.tail(message.prompt, options, rendered.text)
    else:
        token_ids = encoder.encode(message.prompt, add_special_tokens=message.add_special_tokens)
    if isinstance(message, TokenizeOnly):
        return TokensReply(message.uid, token_ids)
    return GenerateRequest(
        message.uid,
        np.asarray(token_ids, dtype="<i4").tobytes(),
        encoder.with_bad_token_ids(message.params),
        priority=message.priority,
        cache_salt=message.cache_salt,
        prompt_tail=tail,
    )


def detokenize(encoder: PromptEncoder, message: DetokenizeOnly) -> TokensReply:
    """Return the text of token ids.

    Raises:
        RequestError: an id is none of the tokenizer's.
    """
    text = encoder.decode(message.token_ids, skip_special_tokens=message.skip_special_tokens)
    return TokensReply(message.uid, text=text)


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
