"""Order of the whole suite: the slow tests first, so that parallel workers end together."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that hold slow tests before the others; within a file nothing moves."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
