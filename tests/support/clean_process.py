"""A clean environment and clean logging for each command that a test runs in this process."""

import logging
import os

import pytest


@pytest.fixture(autouse=True)
def clean_process(monkeypatch):
    for name in [name for name in os.environ if name.upper().startswith("MINISGL_")]:
        monkeypatch.delenv(name)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
    root.setLevel(level)
