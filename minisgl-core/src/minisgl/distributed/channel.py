"""Frames of bytes between two processes on one machine: in order, none lost, never for ever."""

import socket
from typing import Final, Self

_HEADER_BYTES: Final = 8


class Channel:
    """One end of a Unix socket pair that a parent shares with a child process.

    A frame is sent whole. When the peer has ended, what it sent before can still be received.

    Args:
        end: one of ``socket.socketpair()``; the channel closes it.
        timeout: seconds that a peer may take to make room for a frame, or to end one it began.
    """

    def __init__(self, end: socket.socket, timeout: float) -> None:
        self._socket = end
        self._timeout = timeout

    @classmethod
    def pair(cls, timeout: float) -> tuple[Self, socket.socket]:
        """Return a channel, and the socket of its other end."""
        here, there = socket.socketpair()
        return cls(here, timeout), there

    def send(self, frame: bytes | memoryview) -> None:
        """Send one frame; returns as soon as the kernel has it.

        Raises:
            ConnectionError: the peer has ended.
            TimeoutError: the peer reads nothing, and the socket's buffer is full.
        """
        self._socket.settimeout(self._timeout)
        header = len(frame).to_bytes(_HEADER_BYTES, "little")
        sent = self._socket.sendmsg([header, frame])
        if sent < _HEADER_BYTES + len(frame):
            self._socket.sendall((header + bytes(frame))[sent:])

    def receive(self, timeout: float | None) -> bytearray | None:
        """Return the next frame, or ``None`` if none began in time.

        Args:
            timeout: seconds to wait for it: 0 does not wait, ``None`` waits for ever.

        Raises:
            ConnectionError: the peer has ended, and everything that it sent has been received.
            TimeoutError: the peer stopped in the middle of a frame.
        """
        self._socket.settimeout(timeout)
        try:
            first = self._socket.recv(_HEADER_BYTES)
        except (BlockingIOError, TimeoutError):
            return None
        if not first:
            raise ConnectionResetError("the other process has closed the channel")
        self._socket.settimeout(self._timeout)
        header = first + self._read(_HEADER_BYTES - len(first))
        return self._read(int.from_bytes(header, "little"))

    def close(self) -> None:
        """Close this end; the peer sees it at once."""
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionResetError("the other process ended within a frame")
            view = view[count:]
        return data
