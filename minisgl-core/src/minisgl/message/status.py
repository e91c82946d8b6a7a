"""What a worker process tells the supervisor over its own pipe: its start, its life, its end.

JSON-free and pickle-free like everything between processes: msgpack through the same ``Codec``.
"""

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from minisgl.message.codec import Codec


class Starting(msgspec.Struct, frozen=True, tag="starting"):
    """The process has reached ``stage``, such as ``loading the model``."""

    stage: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process serves; ``info`` is what the API server may show about it."""

    info: dict[str, Any] = {}


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The process runs; it says so even while a long step keeps its main thread busy.

    Attributes:
        num_dropped: messages that it has received and that were none.
    """

    num_dropped: int = 0


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The process ends: one line of cause, and the exit code that the server should end with."""

    exit_code: int
    message: str


Status = Starting | Ready | Alive | Failed


class StatusSender:
    """The worker's end of the pipe; any thread may use it."""

    def __init__(self, connection: "Connection[bytes, bytes] | Connection") -> None:
        self._connection = connection
        self._codec: Codec[Status] = Codec(Status)
        self._lock = threading.Lock()
        self.num_dropped: Callable[[], int] = lambda: 0
        """Returns how many messages were none; the worker sets it once it has its socket."""

    def starting(self, stage: str) -> None:
        """Say what the process does now."""
        self._send(Starting(stage))

    def ready(self, info: dict[str, Any] | None = None) -> None:
        """Say that the process serves."""
        self._send(Ready(info or {}))

    def failed(self, exit_code: int, message: str) -> None:
        """Say why the process ends."""
        self._send(Failed(exit_code, message))

    def alive(self) -> bool:
        """Say that the process runs; return whether there is still a pipe to say it over."""
        return self._send(Alive(self.num_dropped()))

    def close(self) -> None:
        """Close the pipe: the supervisor takes it for the end of the work."""
        with self._lock:
            self._connection.close()

    def _send(self, status: Status) -> bool:
        with self._lock:
            try:
                self._connection.send_bytes(self._codec.encode(status))
            except OSError:
                return False  # it is closed, or the supervisor is gone, and its pipe with it
        return True
