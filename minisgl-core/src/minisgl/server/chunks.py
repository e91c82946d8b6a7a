"""Server-sent events of OpenAI's streams, encoded with as little work a token as possible."""

from collections.abc import Callable
from typing import Any

import msgspec

from minisgl.server.streaming import sse_event

_ENCODER = msgspec.json.Encoder()
_MARK = "\x00here\x00"


class ChunkEncoder:
    """Encodes the chunks of one stream.

    A chunk that only carries text is two byte strings, made once, around the encoded text.

    Args:
        head: the fields that every chunk has: ``id``, ``object``, ``created``, ``model``.
        nulls_usage: chunks carry ``"usage": null``, because one at the end has the counts.
    """

    def __init__(self, head: dict[str, Any], *, nulls_usage: bool) -> None:
        self._head = head
        self._nulls_usage = nulls_usage

    def chunk(
        self,
        choices: list[dict[str, Any]],
        usage: dict[str, Any] | None = None,
        **more: Any,
    ) -> bytes:
        """Return one event.

        Args:
            choices: of the chunk.
            usage: counts to send with it.
            more: fields beside ``choices``.
        """
        chunk = {**self._head, "choices": choices, **more}
        if usage is not None or self._nulls_usage:
            chunk["usage"] = usage
        return sse_event(chunk)

    def around_text(self, choice: dict[str, Any], *path: str) -> "TextChunks":
        """Return the encoder of chunks that differ in one text only.

        Args:
            choice: of the chunk.
            path: keys that lead to the text within ``choice``.
        """

        def marked(mark: str) -> bytes:
            changed = dict(choice)
            inner = changed
            for key in path[:-1]:
                inner[key] = inner = dict(inner[key])
            inner[path[-1]] = mark
            return self.chunk([changed])

        return text_chunks(marked)


def text_chunks(event: Callable[[str], bytes]) -> "TextChunks":
    """Return the encoder of events that differ in one text only.

    Args:
        event: makes an event with the given text in it.
    """
    before, after = event(_MARK).split(_ENCODER.encode(_MARK))
    return TextChunks(before, after)


class TextChunks:
    """Chunks that differ in their text only."""

    __slots__ = ("_after", "_before")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after

    def encode(self, text: str) -> bytes:
        """Return the event that carries ``text``."""
        return b"%b%b%b" % (self._before, _ENCODER.encode(text), self._after)
