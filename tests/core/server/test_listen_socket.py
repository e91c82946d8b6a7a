"""The listening socket: one server a port, and a port that is free again at once."""

import socket

import pytest

from minisgl.errors import PortInUseError
from minisgl.server.listen_socket import bind_socket, listen

HOST = "127.0.0.1"


def serve_one_connection_and_hang_up_first(port: int) -> int:
    """Leave a connection in TIME_WAIT on the server's side; return the port."""
    with bind_socket(HOST, port) as bound:
        port = bound.getsockname()[1]
        listen(bound, HOST, port)
        bound.setblocking(True)
        with socket.create_connection((HOST, port)) as client:
            accepted, _ = bound.accept()
            accepted.close()
            assert client.recv(1) == b""
    return port


def test_a_restart_is_not_kept_off_by_lingering_connections() -> None:
    port = serve_one_connection_and_hang_up_first(0)
    for _ in range(2):
        serve_one_connection_and_hang_up_first(port)


def test_the_port_belongs_to_the_first_even_before_it_listens() -> None:
    with bind_socket(HOST, 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port} on {HOST} is in use"):
            bind_socket(HOST, port)
        listen(first, HOST, port)
        with pytest.raises(PortInUseError):
            bind_socket(HOST, port)
