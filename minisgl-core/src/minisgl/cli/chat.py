"""``minisgl chat``: talk to a model in the terminal, without a server."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Final

from minisgl.cli.flags import add_settings_arguments
from minisgl.cli.sampling import add_sampling_arguments, sampling_params
from minisgl.errors import RequestError, SettingsError, nearest
from minisgl.request import SamplingParams
from minisgl.settings import ResolvedSettings

if TYPE_CHECKING:
    from minisgl.llm import LLM, GenerationChunk

COMMANDS: Final = {
    "/reset": "forget the conversation",
    "/help": "show this list",
    "/exit": "leave; so does Ctrl-D",
}
PROMPT: Final = "> "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the system message, how answers are sampled, and all settings."""
    parser.add_argument("--system", metavar="TEXT", help="system message of every conversation")
    add_sampling_arguments(parser, max_tokens=None)
    add_settings_arguments(parser, positional_model=True)


def run(args: argparse.Namespace, resolved: ResolvedSettings) -> int:
    """Load the model and talk until ``/exit`` or the end of the input."""
    # `serve --shell` has none of this command's own flags.
    params = sampling_params(args) if hasattr(args, "max_tokens") else SamplingParams()
    if resolved.settings.model.path is None:
        raise SettingsError("no model is given; type --model PATH_OR_ID")
    from minisgl.llm import LLM

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() line editing and history
    with LLM(settings=resolved.settings, progress=sys.stderr.isatty()) as llm:
        print(f"{resolved.settings.model.path}. Ctrl-C stops an answer; /help lists commands.")
        Shell(llm, params, system=getattr(args, "system", None)).run(_read_line)
    return 0


class Shell:
    """One conversation: reads lines, streams answers, keeps the history.

    Args:
        llm: answers.
        params: of every answer.
        system: system message, if any.
    """

    def __init__(self, llm: "LLM", params: SamplingParams, *, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._opening)

    def run(self, read_line: Callable[[], str]) -> None:
        """Handle lines until ``/exit`` or ``EOFError``; Ctrl-C at the prompt drops the line."""
        while True:
            try:
                line = read_line()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(type /exit or Ctrl-D to leave)")
                continue
            if line.startswith("/"):
                if not self._obey(line.strip()):
                    return
            elif line.strip():
                self._answer(line)

    def _obey(self, command: str) -> bool:
        """Carry out a command; return whether the shell goes on."""
        if command == "/exit":
            return False
        if command == "/reset":
            self.messages = list(self._opening)
            print("(the conversation is forgotten)")
        elif command == "/help":
            for name, text in COMMANDS.items():
                print(f"  {name:<8}{text}")
        else:
            print(
                f"unknown command {command!r}.{nearest(command, COMMANDS)} "
                f"Commands: {', '.join(COMMANDS)}."
            )
        return True

    def _answer(self, line: str) -> None:
        """Stream the answer to ``line``; what was said of it stays, even if it was cut short."""
        self.messages.append({"role": "user", "content": line})
        pieces: list[str] = []
        try:
            with contextlib.closing(self._stream()) as chunks:
                for chunk in chunks:
                    print(chunk.text, end="", flush=True)
                    pieces.append(chunk.text)
        except KeyboardInterrupt:
            # It comes at the end of a step, also of one that made no text to print.
            print(" (stopped)", end="")
        except RequestError as error:
            self.messages.pop()
            print(f"error: {error.message} (/reset forgets the conversation)")
            return
        print()
        self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _stream(self) -> "Generator[GenerationChunk, None, None]":
        """Yield the answer; closing this aborts it."""
        yield from self._llm.stream(self.messages, self._params)


def _read_line() -> str:
    return input(PROMPT)
