"""The stream of an OpenAI-compatible server: server-sent events, and what is in a chunk."""

from typing import Any

import msgspec

from minisgl.errors import MinisglError


class BadStreamError(MinisglError):
    """The server's stream is not what OpenAI's API documents, or reports a failure."""


class EventReader:
    """Cuts a stream of server-sent events into their data, however the bytes arrive."""

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that ``data`` completes."""
        *lines, self._tail = (self._tail + data).split(b"\n")
        events = []
        for line in lines:
            text = line.removesuffix(b"\r")
            if text:
                self._take(text)
            elif self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def close(self) -> list[bytes]:
        """Return the last event, of a server that leaves out the empty line at its end."""
        return self.feed(b"\n\n")

    def _take(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    @property
    def has_output(self) -> bool:
        """Whether the model has generated something for it; a role alone is nothing."""
        if self.text or self.token_ids:
            return True
        delta = self.delta
        return delta is not None and bool(
            delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
        )


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts as the server reports them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that a prefix cache supplied, if the server says so."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class Chunk(msgspec.Struct):
    """One event of a stream, or a whole error."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None
    message: Any = None
    """vLLM's older form of an error has its message at the top."""

    @property
    def has_output(self) -> bool:
        """Whether it carries generated tokens."""
        return any(choice.has_output for choice in self.choices)

    @property
    def num_token_ids(self) -> int | None:
        """Generated tokens that it lists by id, if it lists any."""
        listed = [len(one.token_ids) for one in self.choices if one.token_ids is not None]
        return sum(listed) if listed else None

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ends here, if it does."""
        return next((one.finish_reason for one in self.choices if one.finish_reason), None)


_DECODER: msgspec.json.Decoder[Chunk] = msgspec.json.Decoder(Chunk)


def decode_chunk(data: bytes) -> Chunk:
    """Return the chunk that an event's data hold.

    Raises:
        BadStreamError: it is no chunk, or an error.
    """
    try:
        chunk = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadStreamError(f"an event is no chunk: {error}: {shortened(data)}") from error
    if chunk.error is not None or (chunk.message is not None and not chunk.choices):
        raise BadStreamError(error_message(data))
    return chunk


def error_message(body: bytes) -> str:
    """Return what a server's error says, in whatever form it says it."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return shortened(body)
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            value = value[key]
    return shortened(value if isinstance(value, str) else msgspec.json.encode(value))


def shortened(text: bytes | str) -> str:
    """Return the beginning of a text on one line, as a message quotes it."""
    if isinstance(text, bytes):
        text = text[:1000].decode("utf-8", "replace")
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:197]}..."
