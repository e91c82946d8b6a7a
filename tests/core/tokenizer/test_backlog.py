"""What waits for a tokenizer: who is next, and who is left out."""

from pathlib import Path
from typing import Any, Self, cast

import pytest

from minisgl.message import ForgetRequests, Shutdown, TokenizeOnly
from minisgl.message.sockets import private_addresses
from minisgl.tokenizer import worker
from minisgl.tokenizer.answers import BATCH_CHARS
from minisgl.tokenizer.backlog import Backlog
from minisgl.tokenizer.dispatch import LeastLoaded, WorkCounter, work_of
from support.light_text import LightTokenizer


def text(uid: int, length: int) -> TokenizeOnly:
    return TokenizeOnly(uid, "x" * length)


def rounds(backlog: Backlog) -> list[list[int]]:
    found = []
    while backlog:
        found.append([message.uid for message in backlog.take()])
    return found


def test_short_texts_wait_for_one_long_one_at_most() -> None:
    backlog = Backlog()
    backlog.add([text(1, BATCH_CHARS), text(2, BATCH_CHARS), text(3, BATCH_CHARS)])
    assert [message.uid for message in backlog.take()] == [1]
    backlog.add([text(4, 5), text(5, 5)])
    assert [message.uid for message in backlog.take()] == [2, 4, 5]
    assert rounds(backlog) == [[3]]


def test_a_long_text_does_not_wait_for_ever() -> None:
    backlog = Backlog()
    backlog.add([text(0, BATCH_CHARS), *(text(uid, BATCH_CHARS // 2) for uid in range(1, 20))])
    backlog.take()
    backlog.add([text(100, 2 * BATCH_CHARS)])
    seen: list[int] = []
    for uid in range(200, 300):  # there are always shorter ones
        backlog.add([text(uid, 5)])
        seen += [message.uid for message in backlog.take()]
    assert 100 in seen


def test_everything_is_taken_once() -> None:
    backlog = Backlog()
    backlog.add(text(uid, (uid * 7919) % (BATCH_CHARS // 3)) for uid in range(50))
    taken = [uid for part in rounds(backlog) for uid in part]
    assert sorted(taken) == list(range(50))


def test_what_is_forgotten_is_left_out() -> None:
    backlog = Backlog()
    backlog.add([text(1, 5), text(2, 5), text(3, 5)])
    assert [message.uid for message in backlog.forget([2, 99])] == [2]
    assert rounds(backlog) == [[1, 3]]


def test_all_tokenizers_are_told_what_to_forget(tmp_path: Path) -> None:
    class Inbox(list[Any]):
        send = list.append

    inboxes = [Inbox(), Inbox()]
    counters = [WorkCounter(tmp_path / str(index)) for index in range(2)]
    LeastLoaded(inboxes, counters).send(ForgetRequests([7]))
    assert inboxes == [[ForgetRequests([7])]] * 2


class Wires:
    """Brings what is scripted, one part a look, and keeps what is sent."""

    def __init__(self, *script: list[Any]) -> None:
        self._script = iter(script)
        self.inbox = self.scheduler = self.frontend = self
        self.num_dropped = 0
        self.sent: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def receive(self, timeout: float | None) -> list[Any]:
        return next(self._script)

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Status:
    def ready(self, info: Any) -> None:
        """Nobody asks."""


def served(monkeypatch: pytest.MonkeyPatch, *script: list[Any]) -> tuple[list[int], int]:
    """Return the ids that a worker answers, and how much work it counts as done."""
    wires = Wires(*script)
    monkeypatch.setattr(worker, "_Wires", lambda *_: wires)
    monkeypatch.setattr(worker, "quiet_collector", lambda: None)
    with private_addresses() as addresses:
        worker.serve_tokenizer(cast(Any, LightTokenizer()), addresses, cast(Any, Status()))
        return [reply.uid for reply in wires.sent], WorkCounter(addresses.tokenizer_work).value


def test_a_worker_does_nothing_for_whom_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [text(uid, BATCH_CHARS) for uid in range(4)]
    answered, work = served(monkeypatch, asked, [ForgetRequests([1, 2])], [], [Shutdown()])
    assert answered == [0, 3]
    assert work == sum(map(work_of, asked)), "what is left out is done, too"


def test_a_worker_that_stops_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits then, and a long rest would outlast the time that it gets to stop."""
    asked = [text(uid, BATCH_CHARS) for uid in range(1000)]
    answered, _ = served(monkeypatch, asked, [Shutdown()])
    assert answered == [0]
