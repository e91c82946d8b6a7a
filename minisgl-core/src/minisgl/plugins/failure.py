"""What is remembered of a plugin that could not be loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from minisgl.errors import MinisglError, UnsupportedBackendError

T = TypeVar("T")

Stage = Literal["entry point", "version", "import", "register", "hooks", "records"]


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin that was left out.

    Attributes:
        distribution: whose plugin.
        version: of the distribution.
        stage: of loading: its entry point, the version range that it asks for, the import of its
            module, registration, the names of its hooks, the records that its hooks return.
        error: what went wrong.
        hint: what to do about it.
    """

    distribution: str
    version: str
    stage: Stage
    error: str
    hint: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.stage}: {self.error})"


class LoadError(Exception):
    """Ends the loading of one plugin; the host turns it into a ``PluginFailure``."""

    def __init__(self, stage: Stage, error: str, hint: str) -> None:
        super().__init__(error)
        self.stage: Stage = stage
        self.error = error
        self.hint = hint


@contextmanager
def creating(kind: str, name: str, *, done: str = "created") -> Iterator[None]:
    """Let what a plugin raises while its backend is created say whose it is.

    Args:
        kind: of backend, such as ``attention``.
        name: of the backend, qualified.
        done: what is done to it, if it is something else.

    Raises:
        UnsupportedBackendError: something of the plugin's own was raised.
    """
    try:
        yield
    except Exception as error:
        # What does not fit is no fault of the plugin's.
        if isinstance(error, MinisglError) or type(error).__name__ == "OutOfMemoryError":
            raise
        raise UnsupportedBackendError(
            f"{kind} backend {name!r} was chosen and cannot be {done}: {describe_error(error)}. "
            "Choose another one, or leave its plugin out: --disable-plugin DISTRIBUTION"
        ) from error


def checked(made: T, kind: type[object]) -> T:
    """Return what a record's ``create`` made, if it is of the interface's class.

    Args:
        made: what was returned.
        kind: the class.

    Raises:
        TypeError: it is something else; within ``creating`` that says whose it is.
    """
    if not isinstance(made, kind):
        raise TypeError(f"its create returned {made!r:.80}, which is no {kind.__name__}")
    return made


def describe_error(error: BaseException) -> str:
    """Return an exception's message on one line, with its type where the message alone is bare."""
    message = " ".join(str(error).split())
    if isinstance(error, ImportError) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
