"""Turns steps of tokens into increments of text, and finds stop strings.

Pure: no sockets, no clock. The detokenizer process and the offline ``LLM`` both drive it. It
knows nothing of pages or batches; that a stop string ended a request it reports as ``StopFound``.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from minisgl.errors import without_messages
from minisgl.message import (
    ErrorReply,
    Failure,
    LogprobBatch,
    PromptEcho,
    StopFound,
    StreamStart,
    TextReply,
    TokenBatch,
    TokenLogprob,
)
from minisgl.request import FinishReason, SamplingParams
from minisgl.tokenizer.incremental import TextDecoder
from minisgl.tokenizer.logprobs import (
    RawLogprob,
    StepTokens,
    describe_token,
    echo,
    tokens_by_request,
)
from minisgl.tokenizer.stop_strings import StopFinder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
logger.addFilter(without_messages)


class _Stream:
    """One running request."""

    __slots__ = (
        "finder", "num_tokens", "params", "prompt", "start", "tail", "text", "unsent_ids",
        "unsent_logprobs",
    )  # fmt: skip

    def __init__(self, start: StreamStart, decoder: TextDecoder) -> None:
        self.start = start
        self.params: SamplingParams = start.params
        self.text = decoder.stream(skip_special_tokens=start.params.skip_special_tokens)
        self.finder = (
            StopFinder(start.params.stop, include=start.params.include_stop_str_in_output)
            if start.params.stop
            else None
        )
        self.tail = start.prompt_tail
        self.num_tokens = 0
        self.unsent_ids: list[int] = []
        self.unsent_logprobs: list[TokenLogprob] = []
        self.prompt: PromptEcho | None = None

    def push(
        self, token_ids: list[int], logprobs: Sequence[RawLogprob] = (), *, last_is_stop: bool
    ) -> tuple[str, bool]:
        """Add tokens; return the text to send and whether a stop string ended it.

        With ``last_is_stop`` the last token is the stop token that ended the request: it counts,
        and its text does not appear.
        """
        if self.finder is None and not logprobs and len(token_ids) == 1 and not last_is_stop:
            self.num_tokens += 1  # by far the most common case, and all that follows in it
            self.unsent_ids += token_ids
            return self.text.push(token_ids[0]), False
        pieces: list[str] = []
        silent = last_is_stop and not self.params.include_stop_str_in_output
        for position, token_id in enumerate(token_ids, start=1):
            self.num_tokens += 1
            self.unsent_ids.append(token_id)
            hidden = silent and position == len(token_ids)
            if logprobs:
                self._note_logprob(token_id, logprobs[position - 1], hidden=hidden)
            if hidden:
                break
            text = self.text.push(token_id)
            if self.finder is None:
                pieces.append(text)
                continue
            text, found = self._find_stop(self.finder, text)
            pieces.append(text)
            if found:
                return "".join(pieces), True
        return "".join(pieces), False

    def _note_logprob(self, token_id: int, raw: RawLogprob, *, hidden: bool) -> None:
        """Describe a token that comes next; one that is ``hidden`` adds no bytes to the text."""
        described = describe_token(token_id, raw, self.text.describe)
        if hidden:
            chosen = msgspec.structs.replace(described.chosen, data=b"")
            described = TokenLogprob(chosen, described.top)
        self.unsent_logprobs.append(described)

    def _find_stop(self, finder: StopFinder, text: str) -> tuple[str, bool]:
        """Pass ``text`` through the finder, which may also look at whole text held back so far."""
        may_stop = self.num_tokens >= self.params.min_tokens
        sent, found = finder.feed(text, may_stop=may_stop) if text else ("", False)
        if found or not may_stop:
            return sent, found
        ahead = self.text.peek()
        if ahead and finder.ends_within(ahead):
            more, found = finder.feed(ahead, may_stop=True)
            return sent + more, found
        return sent, False

    def flush(self) -> str:
        """Return the text that was held back."""
        held = self.finder.flush() if self.finder is not None else ""
        return held + self.text.finish()

    def reply(self, text: str) -> TextReply:
        """Return a reply with ``text`` and all that no reply has carried yet."""
        token_ids, self.unsent_ids = self.unsent_ids, []
        logprobs, self.unsent_logprobs = self.unsent_logprobs, []
        prompt, self.prompt = self.prompt, None
        tail, self.tail = self.tail, ""
        return TextReply(
            self.start.uid,
            text,
            token_ids,
            num_prompt_tokens=self.start.num_prompt_tokens,
            num_cached_tokens=self.start.num_cached_tokens,
            logprobs=logprobs,
            prompt=prompt,
            prompt_tail=tail,
        )


class Detokenizer:
    """Incremental text for all running requests of one scheduler.

    A request's state lives from its ``StreamStart`` to its terminal event. After a stop string
    only its uid stays, so that tokens in flight are dropped until the scheduler's own terminal.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._decoder = TextDecoder(tokenizer)
        self._streams: dict[int, _Stream] = {}
        self._stopped: set[int] = set()

    @property
    def num_open(self) -> int:
        """Requests that some state is kept for."""
        return len(self._streams) + len(self._stopped)

    def process(self, batch: TokenBatch) -> tuple[list[TextReply | ErrorReply], list[StopFound]]:
        """Return the replies of one step, and which requests a stop string has just ended.

        A reply comes when there is text to send or the request ends; the token ids of silent
        steps travel with the next one. A request that fails to decode gets an ``ErrorReply`` and
        a ``StopFound``; the others are not affected.
        """
        self._open(batch)
        ends = {uid: index for index, uid in enumerate(batch.finished_uids)}
        replies: list[TextReply | ErrorReply] = []
        stops: list[StopFound] = []
        for uid, tokens in tokens_by_request(batch).items():
            stream = self._streams.get(uid)
            if stream is None:
                continue
            end = ends.get(uid)
            reason = None if end is None else batch.finish_reasons[end]
            reply: TextReply | ErrorReply | None
            try:
                reply = self._advance(stream, tokens, reason)
            except Exception:
                logger.exception("cannot decode the tokens of request %d", uid)
                reply = ErrorReply(uid, "the tokens of this answer cannot be decoded", status=500)
            if reply is None:
                continue
            replies.append(reply)
            if isinstance(reply, ErrorReply) or reply.finish_reason is not None:
                del self._streams[uid]
                self._stopped.add(uid)
                if end is None:
                    stops.append(StopFound(uid, stream.num_tokens))
        replies.extend(
            last
            for index, uid in enumerate(batch.finished_uids)
            if (last := self._finish(uid, index, batch)) is not None
        )
        return replies, stops

    def _open(self, batch: TokenBatch) -> None:
        """Begin the streams of new requests, with their prompts if they want them back."""
        logprobs = {prompt.uid: prompt.logprobs for prompt in batch.prompt_logprobs}
        for start in batch.started:
            stream = self._streams[start.uid] = _Stream(start, self._decoder)
            if start.prompt_token_ids:
                stream.prompt = self._echo(start, logprobs.get(start.uid))

    def _echo(self, start: StreamStart, logprobs: LogprobBatch | None) -> PromptEcho:
        token_ids = np.frombuffer(start.prompt_token_ids, dtype="<i4").tolist()
        return echo(token_ids, logprobs, self._decoder)

    @staticmethod
    def _advance(stream: _Stream, tokens: StepTokens, reason: str | None) -> TextReply | None:
        """Add one step's tokens; return what to send, which is the last reply at a stop string."""
        text, found = stream.push(*tokens, last_is_stop=reason == FinishReason.STOP)
        if found:
            return _last_reply(stream, text, FinishReason.STOP, stream.start.num_cached_tokens)
        return stream.reply(text) if text else None

    def _finish(self, uid: int, index: int, batch: TokenBatch) -> TextReply | ErrorReply | None:
        """Return the terminal event of a request that the scheduler has finished, if it is due."""
        if uid in self._stopped:
            self._stopped.discard(uid)
            return None
        stream = self._streams.pop(uid, None)
        failed = error_of(batch, index)
        if failed is not None:
            return failed
        reason = batch.finish_reasons[index]
        if stream is None:  # ended before its first token
            return TextReply(uid, "", finish_reason=reason)
        return _last_reply(stream, stream.flush(), reason, batch.num_cached_tokens[index])


def _last_reply(stream: _Stream, text: str, reason: str, num_cached_tokens: int) -> TextReply:
    """Return the terminal reply, with the totals."""
    return msgspec.structs.replace(
        stream.reply(text),
        finish_reason=str(reason),
        num_completion_tokens=stream.num_tokens,
        num_cached_tokens=num_cached_tokens,
        stop_string=None if stream.finder is None else stream.finder.found,
    )


def error_of(batch: TokenBatch, index: int) -> ErrorReply | None:
    """Return the reply to the finished request ``index`` of a batch, if it has failed."""
    failure = batch.failures[index]
    if failure is None and batch.finish_reasons[index] != FinishReason.ERROR:
        return None
    failure = failure or Failure("the request failed in the scheduler")
    return ErrorReply(
        batch.finished_uids[index],
        failure.message,
        status=failure.status,
        param=failure.param,
        code=failure.code,
    )
