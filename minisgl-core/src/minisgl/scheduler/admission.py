"""Validation of a request before it enters the queue."""

from http import HTTPStatus

import numpy as np

from minisgl.engine.info import EngineInfo
from minisgl.errors import RequestError
from minisgl.message import GenerateRequest
from minisgl.request import MAX_CACHE_SALT, MAX_PRIORITY, SamplingParams
from minisgl.scheduler.controls import possibly_banned


def validate(request: GenerateRequest, info: EngineInfo) -> int:
    """Return the most tokens, prompt and output together, that the request may reach.

    Raises:
        RequestError: it can never be served as asked; the message has the numbers.
    """
    prompt, params = request.prompt, request.params
    _check_token_ids(prompt, info.vocab_size, "prompt")
    for name, token_ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", list(params.logit_bias)),
        ("bad_token_ids", [token for one in params.bad_token_ids for token in one]),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    ):
        _check_token_ids(np.array(token_ids, dtype=np.int64), info.vocab_size, name)
    _check_possible(params, info)
    _check_scheduling(request)
    num_prompt = len(prompt)
    if not num_prompt:
        raise RequestError("prompt must have at least one token, got an empty one", param="prompt")
    # The last token of a request is never fed, so it needs no place in the pool.
    limit = min(info.max_seq_len, info.num_pages * info.page_size + 1)
    if num_prompt >= limit:
        raise RequestError(
            f"prompt has {num_prompt} tokens; this server takes at most {limit - 1} "
            f"(max_seq_len {limit}, one of them for the answer)",
            param="prompt",
            code="context_length_exceeded",
        )
    room = limit - num_prompt
    for name, value in (("max_tokens", params.max_tokens or 0), ("min_tokens", params.min_tokens)):
        if value > room:
            raise RequestError(
                f"{name} is {value}, but a prompt of {num_prompt} tokens leaves room for {room} "
                f"(max_seq_len {limit}); lower {name} or leave it out",
                param=name,
                code="context_length_exceeded",
            )
    return num_prompt + (params.max_tokens or room)


def check_queue(num_prompt: int, num_queued: int, limit: int | None) -> None:
    """Refuse a prompt behind which too many tokens would wait.

    A prompt that is longer than the limit itself is taken when nothing waits.

    Args:
        num_prompt: tokens of the prompt.
        num_queued: tokens that wait already.
        limit: most of both together.

    Raises:
        RequestError: 429.
    """
    if limit is not None and num_queued and num_queued + num_prompt > limit:
        raise RequestError(
            f"the queue is full: {num_queued} prompt tokens wait, {num_prompt} more are over its "
            f"limit of {limit} (server.max_queued_tokens); try again later",
            status=HTTPStatus.TOO_MANY_REQUESTS,
            code="queue_full",
        )


def _check_possible(params: SamplingParams, info: EngineInfo) -> None:
    """Refuse what may leave no token that is possible."""
    if params.bad_words and not params.bad_token_ids:
        raise RequestError("bad_words need a tokenizer; send bad_token_ids", param="bad_words")
    banned = possibly_banned(params, frozenset(info.eos_token_ids))
    allowed = params.allowed_token_ids
    if allowed is None:
        if len(banned) >= info.vocab_size:
            raise RequestError(
                f"logit_bias of -100, bad words and min_tokens ban all of the {info.vocab_size} "
                "tokens; leave one of them possible",
                param="logit_bias",
            )
    elif banned.issuperset(allowed):
        raise RequestError(
            "allowed_token_ids must have a token that no logit_bias of -100, bad word or (with "
            f"min_tokens) stop token may ban; none of {len(set(allowed))} is left",
            param="allowed_token_ids",
        )


def _check_scheduling(request: GenerateRequest) -> None:
    priority, salt = request.priority, request.cache_salt
    if type(priority) is not int or abs(priority) > MAX_PRIORITY:
        raise RequestError(
            f"priority must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, got "
            f"{priority!r}",
            param="priority",
        )
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_CACHE_SALT):
        got = f"{len(salt)} of them" if isinstance(salt, str) else repr(salt)
        raise RequestError(
            f"cache_salt must be a string of 1 to {MAX_CACHE_SALT} characters, got {got}",
            param="cache_salt",
        )


def _check_token_ids(
    ids: np.ndarray[tuple[int], np.dtype[np.signedinteger]], vocab_size: int, param: str
) -> None:
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise RequestError(
            f"{param} has the token id {int(wrong[0])}; ids must be from 0 to {vocab_size - 1}",
            param=param,
        )
