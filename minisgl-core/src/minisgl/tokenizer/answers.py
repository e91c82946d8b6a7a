"""What the tokenizer answers to messages: one, or all that wait, short texts in one call.

A message that cannot be served has an ``ErrorReply``; nothing here raises.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import msgspec
import numpy as np

from minisgl.errors import RequestError, without_messages
from minisgl.message import (
    DetokenizeOnly,
    ErrorReply,
    GenerateRequest,
    TokenizeOnly,
    TokenizeRequest,
    TokensReply,
)
from minisgl.parsing.reasoning import opening
from minisgl.request import SamplingParams
from minisgl.tokenizer.chat import ChatOptions
from minisgl.tokenizer.dispatch import work_of
from minisgl.tokenizer.encoding import PromptEncoder, is_chat

logger = logging.getLogger(__name__)
logger.addFilter(without_messages)

MadeT = TypeVar("MadeT")
Message = TokenizeRequest | TokenizeOnly | DetokenizeOnly
Reply = GenerateRequest | TokensReply | ErrorReply

BATCH_CHARS: Final = 2**16
"""Most characters of texts that are encoded in one call: all of them wait for its end."""


@dataclass(frozen=True, slots=True)
class _Text:
    """A text that is yet to be encoded, for a message."""

    message: TokenizeRequest | TokenizeOnly
    text: str
    add_special_tokens: bool
    prompt_tail: str = ""


def answers(encoder: PromptEncoder, messages: Sequence[Message]) -> Iterator[tuple[Message, Reply]]:
    """Yield each message with its answer, as soon as it is there; small ones first."""
    batch: list[_Text] = []
    size = 0
    for message in sorted(messages, key=work_of):
        found = _begin(encoder, message)
        if not isinstance(found, _Text):
            yield message, found
            continue
        if batch and size + len(found.text) > BATCH_CHARS:
            yield from _encoded(encoder, batch)
            batch, size = [], 0
        batch.append(found)
        size += len(found.text)
    yield from _encoded(encoder, batch)


def answer(encoder: PromptEncoder, message: Message) -> Reply:
    """Return the tokenised request, the tokens or text that were asked for, or why not."""
    [(_, reply)] = answers(encoder, [message])
    return reply


def _begin(encoder: PromptEncoder, message: Message) -> Reply | _Text:
    """Return the answer, or the text that must be encoded for it."""
    if isinstance(message, DetokenizeOnly):
        return _guarded(message, partial(_detokenize, encoder, message))
    return _guarded(message, partial(_render, encoder, message))


def _guarded(message: Message, make: Callable[[], MadeT]) -> MadeT | ErrorReply:
    """Return what ``make`` returns, or the answer to a message that cannot be served."""
    try:
        return make()
    except RequestError as error:
        return ErrorReply(message.uid, error.message, error.status, error.param, error.code)
    except Exception:
        logger.exception("cannot answer request %d", message.uid)
        what = "tokens" if isinstance(message, DetokenizeOnly) else "prompt"
        return ErrorReply(message.uid, f"the {what} could not be tokenised", status=500)


def _render(encoder: PromptEncoder, message: TokenizeRequest | TokenizeOnly) -> Reply | _Text:
    prompt = message.prompt
    if isinstance(prompt, str):
        return _Text(message, encoder.checked_text(prompt, "prompt"), message.add_special_tokens)
    if not is_chat(prompt):
        return _complete(encoder, message, encoder.encode(prompt))
    options = ChatOptions(
        tools=message.tools,
        template_kwargs=message.template_kwargs,
        add_generation_prompt=message.add_generation_prompt,
        continue_final_message=message.continue_final_message,
    )
    rendered = encoder.chat.render(prompt, options)
    tail = ""
    if isinstance(message, TokenizeRequest) and message.return_prompt_tail:
        tail = encoder.chat.tail(prompt, options, rendered.text)
    if rendered.foreign:
        return _complete(encoder, message, encoder.encode_rendered(rendered), tail)
    # The template writes BOS itself where the model wants one.
    text = encoder.checked_text(rendered.text, "messages")
    return _Text(message, text, add_special_tokens=False, prompt_tail=tail)


def _encoded(encoder: PromptEncoder, batch: Sequence[_Text]) -> Iterator[tuple[Message, Reply]]:
    """Encode all texts, those with and those without special tokens in one call each."""
    for special in (False, True):
        chosen = [entry for entry in batch if entry.add_special_tokens == special]
        if not chosen:
            continue
        try:
            found = encoder.encode_texts([entry.text for entry in chosen], special)
        except Exception:
            # One of them is at fault, and only that one shall fail.
            logger.debug("cannot encode %d texts together", len(chosen), exc_info=True)
            for entry in chosen:
                yield entry.message, _guarded(entry.message, partial(_encode, encoder, entry))
            continue
        for entry, ids in zip(chosen, found, strict=True):
            made = partial(_complete, encoder, entry.message, ids, entry.prompt_tail)
            yield entry.message, _guarded(entry.message, made)


def _encode(encoder: PromptEncoder, entry: _Text) -> Reply:
    [ids] = encoder.encode_texts([entry.text], entry.add_special_tokens)
    return _complete(encoder, entry.message, ids, entry.prompt_tail)


def _complete(
    encoder: PromptEncoder,
    message: TokenizeRequest | TokenizeOnly,
    token_ids: list[int],
    prompt_tail: str = "",
) -> Reply:
    """Return the request for the scheduler, or the tokens if nothing else was asked for."""
    if isinstance(message, TokenizeOnly):
        return TokensReply(message.uid, token_ids)
    encoder.check_not_empty(token_ids, is_chat=is_chat(message.prompt))
    return GenerateRequest(
        message.uid,
        np.asarray(token_ids, dtype="<i4").tobytes(),
        encoder.with_bad_token_ids(_with_reasoning(message, prompt_tail)),
        priority=message.priority,
        cache_salt=message.cache_salt,
        prompt_tail=prompt_tail,
    )


def _with_reasoning(message: TokenizeRequest, prompt_tail: str) -> SamplingParams:
    """Return the parameters of a request, now that its prompt shows how reasoning begins."""
    params, tags = message.params, message.params.reasoning
    if tags is None:
        return params
    found = opening(prompt_tail, tags) if is_chat(message.prompt) else "over"
    opened = msgspec.structs.replace(tags, is_open=found == "open")
    return msgspec.structs.replace(params, reasoning=None if found == "over" else opened)


def _detokenize(encoder: PromptEncoder, message: DetokenizeOnly) -> TokensReply:
    text = encoder.decode(message.token_ids, skip_special_tokens=message.skip_special_tokens)
    return TokensReply(message.uid, text=text)
