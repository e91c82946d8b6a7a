"""The scheduler's ends of the wire in a server: ZMQ sockets to and from the other processes."""

import zmq

from minisgl.message import BackendMessage, DetokenizerMessage, FrontendMessage, Pong, TokenBatch
from minisgl.message.sockets import Addresses, PullSocket, PushSocket


class ZmqTransport:
    """A ``Transport`` over ipc sockets; used by one thread."""

    def __init__(self, addresses: Addresses) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox: PullSocket[BackendMessage] = PullSocket(
            self._context, addresses.scheduler, BackendMessage
        )
        self._detokenizer: PushSocket[DetokenizerMessage] = PushSocket(
            self._context, addresses.detokenizer, DetokenizerMessage
        )
        self._frontend: PushSocket[FrontendMessage] = PushSocket(
            self._context, addresses.frontend, FrontendMessage
        )

    @property
    def num_dropped(self) -> int:
        """Messages dropped because they did not decode."""
        return self._inbox.num_dropped

    def receive(self, timeout: float | None) -> list[BackendMessage]:
        """Return all messages that wait, in order; see ``Transport.receive``."""
        return self._inbox.receive(timeout)

    def send(self, batch: TokenBatch) -> None:
        """Queue new tokens for the detokenizer; never blocks."""
        self._detokenizer.send(batch)

    def pong(self, message: Pong) -> None:
        """Queue a heartbeat for the API server; never blocks."""
        self._frontend.send(message)

    def close(self) -> None:
        """Close the sockets; what is queued gets a second to leave."""
        self._inbox.close()
        self._detokenizer.close(linger_ms=1000)
        self._frontend.close(linger_ms=1000)
        self._context.term()
