"""``minisgl serve``."""

import argparse
import logging
import sys

from minisgl.cli import drop_unwritten
from minisgl.cli.flags import add_settings_arguments
from minisgl.settings import ResolvedSettings

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all settings, and ``--shell``."""
    parser.add_argument(
        "--shell", action="store_true", help="talk to the model here instead: minisgl chat"
    )
    add_settings_arguments(parser, positional_model=True)


def run(args: argparse.Namespace, resolved: ResolvedSettings) -> int:
    """Serve until a signal stops the server; return its exit code."""
    if args.shell:
        from minisgl.cli.chat import run as run_chat

        return run_chat(args, resolved)
    from minisgl.server.supervisor import serve

    return serve(resolved.settings, announce=_announce)


def _announce(text: str) -> None:
    """Print the address; that nobody can read it, because a disk is full, stops no server."""
    try:
        print(text, flush=True)
    except OSError as error:
        logger.warning("cannot write to standard output: %s", error.strerror)
        drop_unwritten(sys.stdout)
