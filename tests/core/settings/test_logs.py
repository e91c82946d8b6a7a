"""The log handler of a process."""

import logging

import pytest

from minisgl.settings import configure_logging


@pytest.fixture
def root_logger():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield root
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
    root.setLevel(level)


def test_a_second_call_replaces_the_handler(root_logger, capsys):
    before = len(root_logger.handlers)
    configure_logging("info")
    configure_logging("warning", process="scheduler")
    assert len(root_logger.handlers) == before + 1
    logging.getLogger("minisgl.x").info("quiet")
    logging.getLogger("acme").warning("loud")
    text = capsys.readouterr().err
    assert text.endswith(" WARNING [scheduler] loud\n")
    assert "quiet" not in text


def test_small_talk_of_libraries_is_dropped(root_logger, capsys):
    configure_logging("debug")
    logging.getLogger("urllib3.pool").info("connected")
    logging.getLogger("urllib3.pool").warning("retry")
    logging.getLogger("minisgl.x").debug("details")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[-1] for line in lines] == ["retry", "details"]
