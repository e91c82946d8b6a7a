"""An argument parser whose errors are ours: one line, the nearest flag, exit code 2."""

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from minisgl.errors import SettingsError, nearest
from minisgl.settings.names import flat_spellings


class Parser(argparse.ArgumentParser):
    """Raises ``SettingsError`` where argparse would print and exit; never guesses abbreviations."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise SettingsError(f"{message}. See: {self.prog} --help")

    def parse_strictly(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse all of ``arguments``.

        Raises:
            SettingsError: an unknown flag, named with the nearest one, or a malformed line.
        """
        namespace, unknown = self.parse_known_args(arguments)
        if unknown:
            given = next((word for word in unknown if word.startswith("-")), unknown[0])
            flag = given.partition("=")[0]
            known = [*re.findall(r"--[\w-]+", self.format_usage())]
            known += [f"--{name}" for name in flat_spellings()]
            if flag.removeprefix("--") in flat_spellings():
                hint = " It is a flag of other commands; any setting can be given with --set."
            else:
                hint = nearest(flag, known) if flag.startswith("-") else ""
            raise SettingsError(f"Unknown argument {given!r}.{hint} See: {self.prog} --help")
        return namespace
