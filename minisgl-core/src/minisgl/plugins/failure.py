"""What is remembered of a plugin that could not be loaded."""

from dataclasses import dataclass
from typing import Literal

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


def describe_error(error: BaseException) -> str:
    """Return an exception's message on one line, with its type where the message alone is bare."""
    message = " ".join(str(error).split())
    if isinstance(error, ImportError) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
