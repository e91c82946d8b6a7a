"""What stands in for a tokenizer where there is none: prompts and answers are token ids.

The two classes have the methods of ``PromptEncoder`` and ``Detokenizer`` that a session calls.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from minisgl.errors import RequestError
from minisgl.message import ErrorReply, PromptEcho, StopFound, TextReply, TokenBatch
from minisgl.request import SamplingParams
from minisgl.tokenizer.detokenizer import error_of
from minisgl.tokenizer.encoding import check_token_ids
from minisgl.tokenizer.logprobs import (
    StepTokens,
    describe_token,
    echo,
    tokens_by_request,
    without_text,
)

NO_TOKENIZER: Final = "there is no tokenizer (model.skip_tokenizer_init=True)"


class TokenIdEncoder:
    """Takes prompts that are token ids already.

    Args:
        vocab_size: of the model; ids from here on are refused.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of ``prompt``, checked.

        Raises:
            RequestError: it is text or chat messages, or not all of its ids are usable.
        """
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], Mapping)):
            raise RequestError(
                f"prompt must be a list of token ids: {NO_TOKENIZER}", param="prompt"
            )
        return check_token_ids(prompt, self._vocab_size)

    def with_bad_token_ids(self, params: SamplingParams) -> SamplingParams:
        """Return ``params``, which must name no words.

        Raises:
            RequestError: they do.
        """
        if params.bad_words:
            raise RequestError(
                f"bad_words cannot be turned into tokens: {NO_TOKENIZER}; bad_token_ids can be set",
                param="bad_words",
            )
        return params


class TokenIdStreams:
    """Hands on the tokens of all running requests, each as it comes, with empty text."""

    def __init__(self) -> None:
        self._num_prompt: dict[int, int] = {}
        self._num_tokens: dict[int, int] = {}
        self._prompts: dict[int, PromptEcho] = {}

    @property
    def num_open(self) -> int:
        """Requests that some state is kept for."""
        return len(self._num_tokens)

    def process(self, batch: TokenBatch) -> tuple[list[TextReply | ErrorReply], list[StopFound]]:
        """Return the replies of one step; nothing here ever stops a request."""
        num_tokens = self._num_tokens
        prompt_logprobs = {prompt.uid: prompt.logprobs for prompt in batch.prompt_logprobs}
        for start in batch.started:
            self._num_prompt[start.uid] = start.num_prompt_tokens
            num_tokens[start.uid] = 0
            if start.prompt_token_ids:
                prompt = np.frombuffer(start.prompt_token_ids, dtype="<i4").tolist()
                self._prompts[start.uid] = echo(prompt, prompt_logprobs.get(start.uid), None)
        new = tokens_by_request(batch)
        for uid, tokens in new.items():
            num_tokens[uid] += len(tokens.token_ids)
        ends = set(batch.finished_uids)
        replies: list[TextReply | ErrorReply] = [
            self._reply(uid, tokens) for uid, tokens in new.items() if uid not in ends
        ]
        replies += [
            self._last_reply(batch, index, new.get(uid, StepTokens([], [])))
            for index, uid in enumerate(batch.finished_uids)
        ]
        return replies, []

    def _reply(self, uid: int, tokens: StepTokens) -> TextReply:
        logprobs = [
            describe_token(token_id, raw, without_text)
            for token_id, raw in zip(tokens.token_ids, tokens.logprobs, strict=False)
        ]
        prompt = self._prompts.pop(uid, None)
        return TextReply(uid, "", tokens.token_ids, logprobs=logprobs, prompt=prompt)

    def _last_reply(
        self, batch: TokenBatch, index: int, tokens: StepTokens
    ) -> TextReply | ErrorReply:
        """Return the terminal event of a request, with the totals."""
        uid = batch.finished_uids[index]
        num_prompt, num_tokens = self._num_prompt.pop(uid, 0), self._num_tokens.pop(uid, 0)
        reply = self._reply(uid, tokens)
        return error_of(batch, index) or msgspec.structs.replace(
            reply,
            finish_reason=batch.finish_reasons[index],
            num_prompt_tokens=num_prompt,
            num_completion_tokens=num_tokens,
            num_cached_tokens=batch.num_cached_tokens[index],
        )
