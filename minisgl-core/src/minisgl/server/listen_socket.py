"""The server's TCP socket, taken before the model loads and opened when everything is ready."""

import errno
import socket

from minisgl.errors import PortInUseError, SettingsError

BACKLOG = 2048


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, which refuses connections until it listens.

    Raises:
        PortInUseError: another process has the port.
        SettingsError: the host is unknown or not this machine's, or the port is not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise SettingsError(f"server.host={host!r} is no address: {error.strerror}") from error
    bound = socket.socket(family, kind, protocol)
    try:
        # Needed to take over a port whose old connections linger; dropped again at once, or
        # a second server could bind the same port while neither listens.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        bound.close()
        raise _explained(error, host, port) from error
    bound.setblocking(False)
    return bound


def listen(bound: socket.socket, host: str, port: int) -> None:
    """Open the socket for connections.

    Raises:
        PortInUseError: another process has opened the port in the meantime.
    """
    try:
        # Listening checks the port once more, and old connections may still linger. Connections
        # inherit this too, and would otherwise block the port for the next server.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.listen(BACKLOG)
    except OSError as error:
        raise _explained(error, host, port) from error


def _explained(error: OSError, host: str, port: int) -> PortInUseError | SettingsError:
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(
            f"port {port} on {host} is in use by another process; type --port with another one"
        )
    return SettingsError(f"cannot listen on {host}, port {port}: {error.strerror}")
