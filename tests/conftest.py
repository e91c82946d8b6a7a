"""Order of the whole suite, and how its property tests draw their examples."""

import pytest

from support.examples import choose_seed, register_profiles, seed_line

register_profiles()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed before hypothesis' own plugin reads it."""
    choose_seed(config)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the seed, whether or not something failed."""
    terminalreporter.write_line(seed_line(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that hold slow tests before the others, so that parallel workers end together.

    Within a file nothing moves.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
