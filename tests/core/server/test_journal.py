"""What a worker's journal keeps of it when it is gone, or when it hangs."""

import contextlib
import logging
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from minisgl.server import journal
from minisgl.server.journal import ask_for_stacks, keep_journal, last_lines
from support.server_process import wait_for

LINES = logging.Formatter("%(levelname)s %(message)s")


def worker(path: Path, ready: Path, what: str) -> None:
    logging.getLogger().setLevel("INFO")
    keep_journal(path, LINES)
    for number in range(2000):
        logging.info("line %d of the worker", number)  # noqa: LOG015
    ready.touch()
    if what == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    a_place_to_hang_in()


def a_place_to_hang_in() -> None:
    while True:
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path: Path):
    """Starts a worker with a journal and returns it once it has written 2000 lines."""
    processes = []

    def start(what: str):
        path, ready = tmp_path / "scheduler.log", tmp_path / "ready"
        process = multiprocessing.get_context("spawn").Process(
            target=worker, args=(path, ready, what)
        )
        process.start()
        processes.append(process)
        wait_for(ready.exists, "the worker")
        return process, path

    yield start
    for process in processes:
        process.kill()
        process.join()


def test_the_last_lines_outlive_a_killed_process_and_stay_small(start, tmp_path: Path) -> None:
    process, path = start("hang")
    process.kill()
    process.join()
    assert last_lines(path) == [f"INFO line {n} of the worker" for n in range(1980, 2000)]
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 100_000


def test_a_process_that_hangs_says_where(start) -> None:
    process, path = start("hang")
    ask_for_stacks(process.pid, path)
    lines = "\n".join(last_lines(path))
    assert "INFO line 1999 of the worker" in lines
    assert "a_place_to_hang_in" in lines
    assert process.is_alive()


def test_a_crash_in_native_code_says_where(start) -> None:
    process, path = start("segfault")
    process.join()
    assert process.exitcode == -signal.SIGSEGV
    lines = "\n".join(last_lines(path))
    assert "Segmentation fault" in lines
    assert "in worker" in lines


def test_who_has_no_journal_has_no_last_lines(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "nobody.log") == []
    ask_for_stacks(2**22 + 1, tmp_path / "nobody.log")  # no process has that number


def test_a_full_disk_loses_lines_and_nothing_else(tmp_path: Path, monkeypatch, capfd) -> None:
    (tmp_path / "scheduler.log").symlink_to("/dev/full")
    root = logging.getLogger()
    before = list(root.handlers)
    monkeypatch.setattr(journal.faulthandler, "enable", lambda *_: None)
    monkeypatch.setattr(journal.faulthandler, "register", lambda *_: None)
    try:
        keep_journal(tmp_path / "scheduler.log", LINES)
        [handler] = [one for one in root.handlers if one not in before]
        handler.handle(logging.makeLogRecord({"msg": "lost", "levelno": 30}))
    finally:
        for handler in [one for one in root.handlers if one not in before]:
            root.removeHandler(handler)
            with contextlib.suppress(OSError):
                handler.close()
    assert "Error" not in capfd.readouterr().err
