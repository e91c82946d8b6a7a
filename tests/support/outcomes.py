"""A pytest plugin that writes to a file which tests failed, of what, and which minisgl ran.

Loaded with ``-p support.outcomes --outcomes=FILE`` by the mutation runner, which must tell a test
that noticed a fault from code that does not even load.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the path of the file."""
    parser.addoption("--outcomes", type=Path, help="write failures as JSON to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Collect from the first test on."""
    config.pluginmanager.register(_Collector(config.getoption("--outcomes")), "collector")


class _Collector:
    """Keeps the failures of a session and writes them at its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failures: list[dict[str, object]] = []

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        # One that is skipped has judged nothing.
        if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
            errors = [type(error).__name__ for error in _leaves(call.excinfo.value)]
            self._failures.append({"test": item.nodeid, "phase": call.when, "errors": errors})

    def pytest_sessionfinish(self) -> None:
        import minisgl

        outcomes = {"minisgl": minisgl.__file__, "failures": self._failures}
        self._path.write_text(json.dumps(outcomes), encoding="utf-8")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of a group, which is how hypothesis reports several, or the one itself."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error
