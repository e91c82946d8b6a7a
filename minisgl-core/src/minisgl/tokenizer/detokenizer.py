"""Turns steps of tokens into increments of text, and finds stop strings.

Pure: no sockets, no clock. The detokenizer process and the offline ``LLM`` both drive it. It
knows nothing of pages or batches; that a stop string ended a request it reports as ``StopFound``.
"""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from minisgl.message import ErrorReply, Failure, StopFound, StreamStart, TextReply, TokenBatch
from minisgl.request import FinishReason, SamplingParams
from minisgl.tokenizer.incremental import TextDecoder
from minisgl.tokenizer.stop_strings import StopFinder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class _Stream:
    """One running request."""

    __slots__ = ("finder", "num_tokens", "params", "start", "tail", "text", "unsent_ids")

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

    def push(self, token_ids: list[int], *, last_is_stop: bool) -> tuple[str, bool]:
        """Add tokens; return the text to send and whether a stop string ended it.

        With ``last_is_stop`` the last token is the stop token that ended the request: it counts,
        and its text does not appear.
        """
        pieces: list[str] = []
        silent = last_is_stop and not self.params.include_stop_str_in_output
        for position, token_id in enumerate(token_ids, start=1):
            self.num_tokens += 1
            self.unsent_ids.append(token_id)
            if silent and position == len(token_ids):
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

    def take_ids(self) -> list[int]:
        """Return the tokens that no reply has carried yet."""
        taken, self.unsent_ids = self.unsent_ids, []
        return taken

    def take_tail(self) -> str:
        """Return the prompt's end, once: the first reply carries it."""
        taken, self.tail = self.tail, ""
        return taken


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
        for start in batch.started:
            self._streams[start.uid] = _Stream(start, self._decoder)
        ends = {uid: index for index, uid in enumerate(batch.finished_uids)}
        replies: list[TextReply | ErrorReply] = []
        stops: list[StopFound] = []
        for uid, token_ids in tokens_by_request(batch).items():
            stream = self._streams.get(uid)
            if stream is None:
                continue
            end = ends.get(uid)
            reason = None if end is None else batch.finish_reasons[end]
            reply: TextReply | ErrorReply | None
            try:
                reply = self._advance(stream, token_ids, reason)
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

    @staticmethod
    def _advance(stream: _Stream, token_ids: list[int], reason: str | None) -> TextReply | None:
        """Add one step's tokens; return what to send, which is the last reply at a stop string."""
        text, found = stream.push(token_ids, last_is_stop=reason == FinishReason.STOP)
        if found:
            return _last_reply(stream, text, FinishReason.STOP, stream.start.num_cached_tokens)
        if not text:
            return None
        return TextReply(
            stream.start.uid,
            text,
            stream.take_ids(),
            num_prompt_tokens=stream.start.num_prompt_tokens,
            prompt_tail=stream.take_tail(),
        )

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
    return TextReply(
        stream.start.uid,
        text,
        stream.take_ids(),
        finish_reason=str(reason),
        num_prompt_tokens=stream.start.num_prompt_tokens,
        num_completion_tokens=stream.num_tokens,
        num_cached_tokens=num_cached_tokens,
        prompt_tail=stream.take_tail(),
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


def tokens_by_request(batch: TokenBatch) -> Mapping[int, list[int]]:
    """Return each request's tokens of this step, in the batch's order."""
    uids = np.frombuffer(batch.uids, dtype="<i8").tolist()
    token_ids = np.frombuffer(batch.token_ids, dtype="<i4").tolist()
    by_request: dict[int, list[int]] = {}
    for uid, token_id in zip(uids, token_ids, strict=True):
        by_request.setdefault(uid, []).append(token_id)
    return by_request
