"""msgpack, typed: a ``Codec`` encodes and decodes one union of message structs."""

from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec

from minisgl.errors import MinisglError, RequestError

MessageT = TypeVar("MessageT")

MAX_UID: Final = 2**63 - 1
Uid = Annotated[int, msgspec.Meta(ge=0, le=MAX_UID)]
"""The server's own number of a request; arrays of them are int64."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_UID)]
"""How many there are of something."""


def check_array(name: str, data: bytes, item_bytes: int) -> None:
    """Refuse a field of packed numbers in which part of one is missing.

    Args:
        name: of the field.
        data: its bytes.
        item_bytes: of each number.

    Raises:
        ValueError: it is.
    """
    if len(data) % item_bytes:
        raise ValueError(f"{name} has {len(data)} bytes, which is no multiple of {item_bytes}")


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
        except (ValueError, RecursionError, RequestError) as error:
            raise DecodeError(f"{len(data)} bytes are no valid message: {error}") from error
        return message
