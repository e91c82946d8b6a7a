"""Where the results of a benchmark go besides the terminal."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minisgl.errors import MinisglError, SettingsError


def check_writable(flag: str, path: Path | None) -> None:
    """Refuse a path that could not be written to, before anything is measured.

    Raises:
        SettingsError: it lies in no folder, or is one.
    """
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise SettingsError(f"{flag} {str(path)!r} must be a file in a folder that exists")
    if path.exists() and not os.access(path, os.W_OK):
        raise SettingsError(f"{flag} {str(path)!r} cannot be written to; name another file")
    if not _is_special(path) and not os.access(path.resolve().parent, os.W_OK):
        raise SettingsError(
            f"{flag} {str(path)!r}: no file can be made in its folder; name another one"
        )


def write_json(path: Path | None, record: dict[str, Any]) -> None:
    """Write a record, if a path was given."""
    if path is not None:
        _write(path, json.dumps(record, indent=2) + "\n")


def write_cells(path: Path | None, record: dict[str, Any], cells: Sequence[Any]) -> None:
    """Write a record with one line for each of its ``cells``, if a path was given."""
    if path is None:
        return
    head = json.dumps(record, indent=2).removesuffix("\n}")
    lines = ",\n".join(f"    {json.dumps(cell)}" for cell in cells)
    _write(path, f'{head},\n  "cells": [\n{lines}\n  ]\n}}\n')


def _write(path: Path, text: str) -> None:
    """Write all of ``text``, or leave what was there: a run may be stopped while it writes."""
    try:
        if _is_special(path):
            path.write_text(text, encoding="utf-8")
            return
        file = path.resolve()  # what a link leads to is replaced, not the link
        beside = file.with_name(f"{file.name}.{os.getpid()}.partial")
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(file)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise MinisglError(f"{str(path)!r} cannot be written: {error.strerror}") from error


def _is_special(path: Path) -> bool:
    """Return whether it is a pipe or a device, which nothing may take the place of."""
    return path.exists() and not path.is_file()
