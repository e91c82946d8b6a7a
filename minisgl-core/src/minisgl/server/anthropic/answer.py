"""Anthropic's messages, whole and as a stream of events."""

from collections.abc import AsyncGenerator, Callable
from typing import Any, Final, Literal

import msgspec

from minisgl.message import TextReply
from minisgl.parsing.interface import (
    ContentText,
    ParserEvent,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from minisgl.request import FinishReason
from minisgl.server.chat.reading import TOOL_CALLS, ChoiceReader, ReadAnswer
from minisgl.server.chunks import TextChunks, text_chunks
from minisgl.server.generation import Generation
from minisgl.server.streaming import sse_event
from minisgl.server.usage import Usage

_REASONS: Final = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    TOOL_CALLS: "tool_use",
}

BlockKind = Literal["text", "thinking", "tool_use"]


class MessagesAnswer:
    """The answer to one request.

    Args:
        label: the request's id.
        model: name that the client knows the model by.
        reader: makes what reads the text.
    """

    def __init__(self, label: str, model: str, reader: Callable[[], ChoiceReader]) -> None:
        self._id = f"msg_{label}"
        self._model = model
        self._reader = reader()
        self._usage = Usage()
        self._last: TextReply | None = None

    async def collect(self, generation: Generation) -> dict[str, Any]:
        """Return the whole message.

        Raises:
            RequestError: the request was refused or failed.
        """
        answer = ReadAnswer()
        async for _, reply in generation:
            self._take(reply)
            answer.add(self._reader.read(reply))
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            content.append(_block("thinking", "".join(answer.reasoning)))
        if answer.content:
            content.append(_block("text", "".join(answer.content)))
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments)}
            for call in answer.calls
        ]
        return {**self._message(content), **self._end(), "usage": self._counts()}

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield the stream: one block after the other, each begun, filled and stopped.

        Raises:
            RequestError: the request failed on the way.
        """
        blocks = _BlockStream()
        has_begun = False
        async for replies in generation.batches():
            events: list[bytes] = []
            for _, reply in replies:
                self._take(reply)
                if not has_begun:
                    has_begun = True
                    events += [self._start(), _event("ping")]
                for event in self._reader.read(reply):
                    events += blocks.add(event)
            yield b"".join(events)
        end = _event("message_delta", delta=self._end(), usage=self._counts())
        yield b"".join([*blocks.stop(), end, _event("message_stop")])

    def _take(self, reply: TextReply) -> None:
        self._usage.add(0, reply)
        self._last = reply

    def _start(self) -> bytes:
        usage = {**self._counts(), "output_tokens": 0}
        none = {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**self._message([]), **none, "usage": usage})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
        }

    def _end(self) -> dict[str, Any]:
        """Return why the message ended."""
        last = self._last
        reason = "" if last is None else self._reader.reason(last.finish_reason or "")
        stop_string = None if last is None else last.stop_string
        if stop_string is not None and reason != TOOL_CALLS:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
        return {"stop_reason": _REASONS.get(reason, "end_turn"), "stop_sequence": None}

    def _counts(self) -> dict[str, int]:
        """Return Anthropic's ``usage``, where cached tokens are not part of ``input_tokens``."""
        usage = self._usage
        return {
            "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_cached_tokens,
            "output_tokens": usage.num_completion_tokens,
        }


class _BlockStream:
    """Content blocks as events: at most one is open, and each gets the next index."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: BlockKind | None = None
        self._chunks: TextChunks | None = None

    def add(self, event: ParserEvent) -> list[bytes]:
        """Return the events that ``event`` leads to."""
        match event:
            case ContentText(text=text):
                return self._more("text", _block("text", ""), text)
            case ReasoningText(text=text):
                return self._more("thinking", _block("thinking", ""), text)
            case ToolCallStart():
                block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                return [*self.stop(), self._begin("tool_use", block)]
            case ToolCallArguments(fragment=fragment):
                return [] if self._chunks is None else [self._chunks.encode(fragment)]

    def stop(self) -> list[bytes]:
        """Return the end of the open block, if one is open."""
        if self._kind is None:
            return []
        self._kind = None
        return [_event("content_block_stop", index=self._index)]

    def _more(self, kind: BlockKind, empty: dict[str, Any], text: str) -> list[bytes]:
        events: list[bytes] = []
        if self._kind != kind:
            events = [*self.stop(), self._begin(kind, empty)]
        assert self._chunks is not None
        return [*events, self._chunks.encode(text)]

    def _begin(self, kind: BlockKind, block: dict[str, Any]) -> bytes:
        self._index += 1
        self._kind = kind
        delta, field = {
            "text": ("text_delta", "text"),
            "thinking": ("thinking_delta", "thinking"),
            "tool_use": ("input_json_delta", "partial_json"),
        }[kind]
        self._chunks = text_chunks(
            lambda mark: _event(
                "content_block_delta", index=self._index, delta={"type": delta, field: mark}
            )
        )
        return _event("content_block_start", index=self._index, content_block=block)


def _block(kind: Literal["text", "thinking"], text: str) -> dict[str, Any]:
    """Return a block of text; thinking has a signature, which this server does not need."""
    return {"type": kind, kind: text, **({"signature": ""} if kind == "thinking" else {})}


def _object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; of one that was cut off, what there is."""
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {"_incomplete_json": arguments} if arguments else {}
    return value if isinstance(value, dict) else {"_value": value}


def _event(kind: str, **fields: Any) -> bytes:
    return sse_event({"type": kind, **fields}, kind)
