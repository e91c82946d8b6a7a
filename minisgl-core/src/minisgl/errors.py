"""Every error that minisgl raises on purpose, and the exit code that each one means.

MinisglError                       1
├── SettingsError                  2   a setting is unknown, malformed or contradicts another
├── PluginError                    3   a plugin is broken, missing or ambiguous
│   ├── UnknownBackendError        3   no installed plugin offers the name
│   ├── AmbiguousBackendError      3   several plugins offer the name
│   └── UnsupportedBackendError    3   the chosen one cannot run here
├── ModelLoadError                 4   checkpoint, tokenizer or configuration cannot be loaded
├── DoesNotFitError                5   not enough memory for the model or for one request
├── PortInUseError                 6   the HTTP port is taken
├── WorkerDiedError                7   a process of the server died or hung
├── EngineLostError                7   a tensor-parallel rank died, fell behind or disagrees
└── RequestError                   -   one request is refused or failed; has a status and field

A message says what is wrong, the value found, what is allowed, and what to type instead.
"""

import logging
import traceback
from collections.abc import Iterable
from difflib import get_close_matches


class MinisglError(Exception):
    """Base of all errors below; ``exit_code`` is what the command line ends with."""

    exit_code = 1


class SettingsError(MinisglError):
    """A setting is unknown, malformed, or contradicts another one."""

    exit_code = 2


class PluginError(MinisglError):
    """A plugin is broken, missing or ambiguous, and what the user asked for needs it."""

    exit_code = 3


class UnknownBackendError(PluginError):
    """No installed plugin offers the backend or architecture that was asked for."""


class AmbiguousBackendError(PluginError):
    """Several distributions offer one name; the message says how to qualify it."""


class UnsupportedBackendError(PluginError):
    """The chosen backend exists and cannot run here; the message says why."""


class ModelLoadError(MinisglError):
    """A checkpoint, its tokenizer or its configuration cannot be loaded."""

    exit_code = 4


class DoesNotFitError(MinisglError):
    """The model, or the smallest useful KV pool, does not fit into memory."""

    exit_code = 5


class PortInUseError(MinisglError):
    """The HTTP port is taken by another process."""

    exit_code = 6


class WorkerDiedError(MinisglError):
    """A process of the server died or stopped answering."""

    exit_code = 7


class EngineLostError(MinisglError):
    """A tensor-parallel rank died, fell behind, failed or disagrees: the engine cannot go on.

    Never the failure of one step: whoever catches failed steps lets this one through.

    Args:
        message: which rank, and what became of it.
        exit_code: that of the rank's own error, if it failed at its start.
    """

    exit_code = 7

    def __init__(self, message: str, exit_code: int = exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RequestError(MinisglError):
    """One request is refused or has failed; it never ends the server.

    Args:
        message: what is wrong, the value, and what is allowed.
        param: the request field at fault, if it is one field's.
        status: HTTP status code (400 refused, 404 unknown model, 503 not ready, 500 failed).
        code: a short machine-readable reason, as in OpenAI's error objects.
    """

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" Nearest: 'x'."`` for the known name closest to ``name``, or an empty string."""
    matches = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Nearest: {matches[0]!r}." if matches else ""


def stack_of(error: BaseException) -> str:
    """Return where an exception and its causes were raised, and their types, without messages.

    For logs about one request: a message of a library or a template may quote the client's text.
    """
    parts = []
    chain: BaseException | None = error
    while chain is not None:
        frames = "".join(traceback.format_tb(chain.__traceback__))
        name = f"{type(chain).__module__}.{type(chain).__qualname__}"
        parts.append(f"Traceback without messages:\n{frames}{name}")
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    return "\nwhile handling:\n".join(parts)


def without_messages(record: logging.LogRecord) -> bool:
    """Filter of loggers that tell of one request's failures: see ``stack_of``."""
    if record.exc_info and record.exc_info[1] is not None:
        record.msg = f"{record.getMessage()}:\n{stack_of(record.exc_info[1])}"
        record.args, record.exc_info = (), None
    return True
