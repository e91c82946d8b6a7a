"""Anthropic's messages, whole and as a stream of events."""

from collections.abc import AsyncGenerator, Callable, Iterable
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
from minisgl.server.chat.reading import TOOL_CALLS, ChoiceReader
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
        blocks = _Blocks()
        async for _, reply in generation:
            self._take(reply)
            blocks.add(self._reader.read(reply, self._usage))
        return {**self._message(blocks.content()), **self._end(), "usage": self._counts()}

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
                for event in self._reader.read(reply, self._usage):
                    events += blocks.add(event)
            yield b"".join(events)
        end = _event("message_delta", delta=self._end(), usage=self._counts())
        yield b"".join([*blocks.stop(), end, _event("message_stop")])

    def _take(self, reply: TextReply) -> None:
        self._usage.add(0, reply)
        self._last = reply

    def _start(self) -> bytes:
        nothing = {"output_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}}
        usage = {**self._counts(), **nothing}
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

    def _counts(self) -> dict[str, Any]:
        """Return Anthropic's ``usage``, where cached tokens are not part of ``input_tokens``."""
        usage = self._usage
        return {
            "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_cached_tokens,
            "output_tokens": usage.num_completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
        }


class _Blocks:
    """Content blocks as a list, the same as those of a stream."""

    def __init__(self) -> None:
        self._blocks: list[tuple[dict[str, Any], list[str]]] = []

    def add(self, events: Iterable[ParserEvent]) -> None:
        """Take what comes next."""
        for event in events:
            match event:
                case ContentText(text=text):
                    self._more("text", text)
                case ReasoningText(text=text):
                    self._more("thinking", text)
                case ToolCallStart():
                    self._blocks.append((_tool_use(event), []))
                case ToolCallArguments(fragment=fragment):
                    self._blocks[-1][1].append(fragment)

    def content(self) -> list[dict[str, Any]]:
        """Return all blocks."""
        return [
            {**block, "input": _object("".join(texts))}
            if block["type"] == "tool_use"
            else {**block, block["type"]: "".join(texts)}
            for block, texts in self._blocks
        ]

    def _more(self, kind: Literal["text", "thinking"], text: str) -> None:
        if not self._blocks or self._blocks[-1][0]["type"] != kind:
            self._blocks.append((_empty(kind), []))
        self._blocks[-1][1].append(text)


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
                return self._more("text", text)
            case ReasoningText(text=text):
                return self._more("thinking", text)
            case ToolCallStart():
                return [*self.stop(), self._begin("tool_use", _tool_use(event))]
            case ToolCallArguments(fragment=fragment):
                return [] if self._chunks is None else [self._chunks.encode(fragment)]

    def stop(self) -> list[bytes]:
        """Return the end of the open block, if one is open; thinking ends with its signature."""
        if self._kind is None:
            return []
        signature = []
        if self._kind == "thinking":
            delta = {"type": "signature_delta", "signature": ""}
            signature = [_event("content_block_delta", index=self._index, delta=delta)]
        self._kind = None
        return [*signature, _event("content_block_stop", index=self._index)]

    def _more(self, kind: Literal["text", "thinking"], text: str) -> list[bytes]:
        events: list[bytes] = []
        if self._kind != kind:
            events = [*self.stop(), self._begin(kind, _empty(kind))]
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


def _empty(kind: Literal["text", "thinking"]) -> dict[str, Any]:
    """Return an empty block; thinking has a signature, which this server does not need."""
    return {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}


def _tool_use(call: ToolCallStart) -> dict[str, Any]:
    """Return the block of a call without its input."""
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def _object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; of one that was cut off, what there is."""
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {"_incomplete_json": arguments} if arguments else {}
    return value if isinstance(value, dict) else {"_value": value}


def _event(kind: str, **fields: Any) -> bytes:
    return sse_event({"type": kind, **fields}, kind)
