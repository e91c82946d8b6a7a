"""Installs the log handler of a process. Only command lines and worker processes call it."""

import logging
import sys

_HANDLER = "minisgl"

_CHATTY = frozenset(
    {"asyncio", "filelock", "fsspec", "httpcore", "httpx", "huggingface_hub", "torch", "urllib3"}
)


def configure_logging(level: str, process: str | None = None) -> logging.Formatter:
    """Log to standard error from ``level`` up; a second call replaces the first one's handler.

    Args:
        level: ``debug``, ``info``, ``warning``, ``error`` or ``critical``.
        process: name of a worker process, shown in each line.

    Returns:
        The form of the lines, for further handlers.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if handler.get_name() == _HANDLER]:
        root.removeHandler(handler)
        handler.close()
    handler = logging.StreamHandler(sys.stderr)
    handler.set_name(_HANDLER)
    handler.addFilter(_is_wanted)
    label = f" [{process}]" if process else ""
    lines = logging.Formatter(f"%(asctime)s %(levelname)s{label} %(message)s", "%Y-%m-%d %H:%M:%S")
    handler.setFormatter(lines)
    root.addHandler(handler)
    root.setLevel(level.upper())
    return lines


def _is_wanted(record: logging.LogRecord) -> bool:
    """Drop the small talk of libraries; their warnings stay."""
    return record.levelno >= logging.WARNING or record.name.split(".")[0] not in _CHATTY
