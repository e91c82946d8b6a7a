"""Log-probabilities out of thin air, for tests of how answers show them."""

from typing import Any

import msgspec

from minisgl.message import (
    GenerateRequest,
    PromptEcho,
    TextReply,
    TokenLogprob,
    TopLogprob,
)


class MadeUpLogprobs:
    """Adds to replies what a request asked for, where nobody else has.

    Token ``t`` has the log-probability ``-(t % 8) / 8``; its alternatives are the tokens before it,
    each a little likelier.
    """

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[int, GenerateRequest] = {}
        self._told: set[int] = set()

    def note(self, request: GenerateRequest) -> None:
        self._requests[request.uid] = request

    def add(self, reply: TextReply) -> TextReply:
        request = self._requests[reply.uid]
        params = request.params
        changes: dict[str, Any] = {}
        if params.logprobs is not None and reply.token_ids and not reply.logprobs:
            changes["logprobs"] = [self._token(t, params.logprobs) for t in reply.token_ids]
        wants_prompt = params.return_prompt or params.prompt_logprobs is not None
        if wants_prompt and reply.prompt is None and request.uid not in self._told:
            changes["prompt"] = self._prompt(request)
        self._told.add(request.uid)
        return msgspec.structs.replace(reply, **changes)

    def _prompt(self, request: GenerateRequest) -> PromptEcho:
        ids = request.prompt.tolist()
        num_top = request.params.prompt_logprobs
        logprobs = [] if num_top is None else [None, *(self._token(t, num_top) for t in ids[1:])]
        return PromptEcho(ids, self._tokenizer.decode(ids), logprobs)

    def _token(self, token_id: int, num_top: int) -> TokenLogprob:
        tops = [self._top(max(token_id - back, 0), back) for back in range(num_top, 0, -1)]
        return TokenLogprob(self._top(token_id, 0), tops)

    def _top(self, token_id: int, back: int) -> TopLogprob:
        data = _bytes_of(self._tokenizer.convert_ids_to_tokens(token_id))
        return TopLogprob(
            token_id,
            data.decode(errors="replace"),
            data,
            -(token_id % 8) / 8 + back,
            max(1, 10 - back),
        )


def _bytes_of(token: str) -> bytes:
    """The bytes of a token of GPT-2's alphabet."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    table = {character: byte for byte, character in bytes_to_unicode().items()}
    return bytes(table[character] for character in token if character in table)
