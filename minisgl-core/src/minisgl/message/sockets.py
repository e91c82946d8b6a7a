"""Typed ZMQ sockets: one direction, one group of messages, msgpack only.

A receiver binds (``PullSocket``, ``AsyncPullSocket``), senders connect (``PushSocket``); all
sockets are ipc files in one private directory. Sending never blocks and never waits for a peer:
queues are bounded by admission, not here. Bytes that do not decode are dropped and counted.
"""

import contextlib
import fcntl
import logging
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from minisgl.message.codec import Codec, DecodeError

logger = logging.getLogger(__name__)

MessageT = TypeVar("MessageT")

MAX_IPC_PATH: Final = 90
"""Longest directory name: a Unix socket's whole path must fit into 107 bytes."""


_PREFIX: Final = "minisgl-"
_LOCK: Final = "lock"
_EVENTS: Final = int(zmq.EVENTS)
_READABLE: Final = int(zmq.POLLIN)


class Addresses(msgspec.Struct, frozen=True):
    """The ZMQ addresses of one server, each bound by the process that it is named after."""

    frontend: str
    tokenizer: str
    scheduler: str
    detokenizer: str

    def of_tokenizer(self, index: int) -> "Addresses":
        """Return the addresses that a server's tokenizer number ``index`` gets."""
        own = f"{self.tokenizer}-{index}" if index else self.tokenizer
        return msgspec.structs.replace(self, tokenizer=own)

    def journal(self, process: str) -> Path:
        """Return the file that a worker's last log lines go to."""
        return Path(self.frontend.removeprefix("ipc://")).with_name(f"{process}.log")

    @property
    def tokenizer_work(self) -> Path:
        """The file in which the tokenizer counts what it has done."""
        return Path(f"{self.tokenizer.removeprefix('ipc://')}.work")


@contextmanager
def private_addresses() -> Iterator[Addresses]:
    """Yield fresh ipc addresses in a directory of mode 0700, which is removed at exit.

    If this process is killed, a process that does nothing else removes the directory. What one has
    left behind all the same, with a whole machine, is removed here: a process holds a lock on its
    own directory, which goes with it however it ends.
    """
    with contextlib.ExitStack() as stack:
        directory = _locked_directory(stack)
        _remove_abandoned(directory.parent)
        stack.enter_context(_removed_at_our_end(directory))
        yield Addresses(
            **{name: f"ipc://{directory / name}.ipc" for name in Addresses.__struct_fields__}
        )


def _locked_directory(stack: contextlib.ExitStack) -> Path:
    """Return a new directory with a lock that ``stack`` holds until it removes both."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
        if len(str(directory)) > MAX_IPC_PATH:
            directory.rmdir()
            directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
        lock = stack.enter_context((directory / _LOCK).open("w"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        # Another process may have taken it for abandoned in the moment before it was locked.
        if _lock(lock) and (directory / _LOCK).exists():
            return directory


@contextmanager
def _removed_at_our_end(directory: Path) -> Iterator[None]:
    """Remove a directory even if this process is killed: somebody reads a pipe until it ends.

    In a session of its own, which signals to our group or terminal do not reach.
    """
    watch = ["sh", "-c", 'read -r _; rm -rf -- "$1"', "minisgl-cleaner", str(directory)]
    try:
        cleaner = subprocess.Popen(  # noqa: S603
            watch,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:  # no shell, or no more processes: the next server cleans up
        yield
        return
    with cleaner:  # closes the pipe and waits
        yield


def _remove_abandoned(parent: Path) -> None:
    """Remove directories whose process is gone; others of that name stay."""
    for path in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), path.open("r+") as lock:
            if _lock(lock):
                shutil.rmtree(path.parent, ignore_errors=True)


def _lock(file: IO[str]) -> bool:
    """Take the lock of a file; return whether nobody else has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class _Receiver(Generic[MessageT]):
    """Decodes what arrives; counts and drops what is no message."""

    def __init__(self, message_type: Any, name: str) -> None:
        self._codec: Codec[MessageT] = Codec(message_type)
        self._name = name
        self.num_dropped = 0

    def decode(self, frames: list[bytes]) -> list[MessageT]:
        """Return the messages in ``frames``, without those that do not decode."""
        messages = []
        for data in frames:
            try:
                messages.append(self._codec.decode(data))
            except DecodeError as error:
                self.num_dropped += 1
                level = logging.WARNING if self.num_dropped == 1 else logging.DEBUG
                logger.log(level, "%s dropped a message: %s", self._name, error)
        return messages


def _open(context: zmq.Context[Any], kind: int) -> Any:
    """Return a socket that neither lingers at exit nor limits its queues."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = 0
    socket.rcvhwm = 0
    return socket


class PushSocket(Generic[MessageT]):
    """Sends messages of one group to the process that bound ``address``.

    Works in any process, the asyncio one included: with unlimited queues a send never waits.
    """

    def __init__(self, context: zmq.Context[Any], address: str, message_type: Any) -> None:
        self._codec: Codec[MessageT] = Codec(message_type)
        self._socket: zmq.Socket[bytes] = _open(context, zmq.PUSH)
        self._socket.connect(address)

    def send(self, message: MessageT) -> None:
        """Queue ``message``; returns at once.

        Raises:
            UnicodeEncodeError: a string holds lone surrogates.
            OverflowError: an integer has more than 64 bits.
        """
        self._socket.send(self._codec.encode(message), zmq.NOBLOCK)

    def close(self, linger_ms: int = 0) -> None:
        """Close; what is still queued gets ``linger_ms`` to leave."""
        self._socket.close(linger=linger_ms)


class PullSocket(Generic[MessageT]):
    """Receives messages of one group at ``address``."""

    def __init__(self, context: zmq.Context[Any], address: str, message_type: Any) -> None:
        self._receiver: _Receiver[MessageT] = _Receiver(message_type, address)
        self._socket: zmq.Socket[bytes] = _open(context, zmq.PULL)
        self._socket.bind(address)

    @property
    def num_dropped(self) -> int:
        """Messages dropped because they did not decode."""
        return self._receiver.num_dropped

    def receive(self, timeout: float | None) -> list[MessageT]:
        """Return all messages that wait, in order of arrival.

        Args:
            timeout: seconds to wait for the first one: 0 does not wait, ``None`` waits for ever.
        """
        if timeout != 0:
            self._socket.poll(None if timeout is None else max(1, round(timeout * 1000)))
        return self._receiver.decode(_drain(self._socket))

    def close(self) -> None:
        """Close and drop what was not read."""
        self._socket.close(linger=0)


class AsyncPullSocket(Generic[MessageT]):
    """``PullSocket`` for the API server's event loop."""

    def __init__(self, context: zmq.asyncio.Context, address: str, message_type: Any) -> None:
        self._receiver: _Receiver[MessageT] = _Receiver(message_type, address)
        self._socket: zmq.asyncio.Socket = _open(context, zmq.PULL)
        self._socket.bind(address)
        self._readable_now: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)

    @property
    def num_dropped(self) -> int:
        """Messages dropped because they did not decode."""
        return self._receiver.num_dropped

    async def receive(self) -> list[MessageT]:
        """Wait for a message and return all that are there, in order of arrival."""
        first = await self._socket.recv()
        return self._receiver.decode([first, *_drain(self._readable_now)])

    def close(self) -> None:
        """Close and drop what was not read."""
        self._socket.close(linger=0)


def _drain(socket: "zmq.Socket[bytes]") -> list[bytes]:
    """Return all messages that can be read without waiting."""
    frames = []
    # Asking first costs half of what an exception does, and the answer is mostly no.
    while int(socket.getsockopt(_EVENTS)) & _READABLE:
        frames.append(socket.recv(zmq.NOBLOCK))
    return frames
