"""msgpack, typed: a ``Codec`` encodes and decodes one union of message structs."""

from typing import Any, Generic, TypeVar

import msgspec

from minisgl.errors import MinisglError, RequestError

MessageT = TypeVar("MessageT")


class DecodeError(MinisglError):
    """Bytes from a socket are no message of the expected group; they are dropped and counted."""


class Codec(Generic[MessageT]):
    """Encode and decode messages of one group (a union of tagged structs).

    Example: ``codec: Codec[BackendMessage] = Codec(BackendMessage)``.
    """

    def __init__(self, message_type: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(message_type)

    def encode(self, message: MessageT) -> bytes:
        """Return ``message`` as msgpack bytes."""
        return self._encoder.encode(message)

    def decode(self, data: bytes | memoryview) -> MessageT:
        """Return the message that ``data`` holds.

        Raises:
            DecodeError: ``data`` is malformed, or holds a message of another group, or a field
                value that the message's own validation refuses.
        """
        try:
            message: MessageT = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, RequestError) as error:
            raise DecodeError(f"{len(data)} bytes are no valid message: {error}") from error
        return message
