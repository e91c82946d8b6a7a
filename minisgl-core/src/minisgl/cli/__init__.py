"""The command line: ``minisgl COMMAND``. A command's module is imported only when it is chosen.

Every error of ours ends here as one line on standard error and its exit code.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TextIO

from minisgl.errors import MinisglError, SettingsError, nearest

COMMANDS: Mapping[str, tuple[str, str]] = {
    "serve": ("minisgl.cli.serve", "serve a model over HTTP, in OpenAI's API"),
    "generate": ("minisgl.cli.generate", "generate text for prompts, offline"),
    "chat": ("minisgl.cli.chat", "talk to a model in the terminal"),
    "bench": ("minisgl.cli.bench", "measure: speed offline, of servers, kernels, the host"),
    "tune": ("minisgl.cli.tune", "measure what kernels a model runs fastest with, and keep it"),
    "plugins": ("minisgl.cli.plugins", "list, show, check and explain plugins"),
    "config": ("minisgl.cli.config", "show the effective settings, or their JSON Schema"),
}
"""Commands in the order of the help: module, and one line about it."""

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    Args:
        argv: arguments after the program's name; ``None`` takes the process's own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except MinisglError as error:
        logger.debug("traceback", exc_info=error)
        with contextlib.suppress(OSError):  # a full disk must not change the exit code
            print(f"minisgl: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has enough; Python must not complain when it closes the pipe.
        drop_unwritten(sys.stdout)
        return 141
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    finally:
        _drop_unwritten_errors()


def _drop_unwritten_errors() -> None:
    """Drop what a full disk did not take of standard error."""
    if sys.stderr is None:  # closed before we began
        return
    try:
        sys.stderr.flush()
    except OSError:
        drop_unwritten(sys.stderr)


def drop_unwritten(stream: TextIO) -> None:
    """Let a standard stream lead nowhere.

    Python would try once more at its end to write what it has kept, fail, and make that the exit
    code.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else SettingsError.exit_code
    if arguments[0] in ("-V", "--version"):
        from minisgl import __version__

        print(f"minisgl {__version__}")
        return 0
    command, rest = arguments[0], arguments[1:]
    if command.startswith("-"):
        command, rest = "serve", arguments
    if command not in COMMANDS:
        raise SettingsError(
            f"Unknown command {command!r}. Commands: {', '.join(COMMANDS)}."
            f"{nearest(command, COMMANDS)}"
        )
    return _run_command(command, rest)


def _run_command(command: str, arguments: list[str]) -> int:
    from minisgl.cli import flags
    from minisgl.cli.parser import Parser
    from minisgl.settings import configure_logging, resolve_settings

    path, summary = COMMANDS[command]
    module = import_module(path)
    parser = Parser(prog=f"minisgl {command}", description=f"{summary}.", allow_abbrev=False)
    module.add_arguments(parser)
    args = parser.parse_strictly(arguments)
    args.command_line = ("minisgl", command, *arguments)
    resolved = resolve_settings(
        flags=flags.collect(args), config=getattr(args, "config", None), environ=os.environ
    )
    configure_logging(resolved.settings.log.level)
    code: int = module.run(args, resolved)
    return code


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    return (
        "usage: minisgl COMMAND [...]\n\n"
        "Serve and run language models.\n\n"
        f"commands:\n{commands}\n\n"
        "options:\n"
        "  -h, --help     show this text; after a command, that command's\n"
        "  -V, --version  show the version\n\n"
        "Without a command, flags belong to serve: minisgl --model PATH_OR_ID"
    )
