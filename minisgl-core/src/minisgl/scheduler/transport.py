"""How messages reach the scheduler and results leave it: ZMQ online, memory offline."""

from collections import deque
from typing import Protocol

from minisgl.message import BackendMessage, Pong, TokenBatch


class Transport(Protocol):
    """The scheduler's two ends of the wire."""

    def receive(self, timeout: float | None) -> list[BackendMessage]:
        """Return all messages that wait, in order.

        Args:
            timeout: seconds to wait for the first one: 0 does not wait, ``None`` waits for ever.
        """

    def send(self, batch: TokenBatch) -> None:
        """Hand new tokens and finished requests to the detokenizer; never blocks."""

    def pong(self, message: Pong) -> None:
        """Answer a heartbeat; never blocks."""


class MemoryTransport:
    """Offline: messages in a queue of the same process.

    Its ``receive`` never waits: whoever fed the queue also runs the scheduler's steps.
    """

    def __init__(self) -> None:
        self.inbox: deque[BackendMessage] = deque()
        self.outbox: list[TokenBatch] = []

    def receive(self, timeout: float | None) -> list[BackendMessage]:  # noqa: ARG002
        """Return and remove everything that was put into ``inbox``."""
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def send(self, batch: TokenBatch) -> None:
        """Append to ``outbox``."""
        self.outbox.append(batch)

    def pong(self, message: Pong) -> None:
        """Offline nobody asks for heartbeats."""
