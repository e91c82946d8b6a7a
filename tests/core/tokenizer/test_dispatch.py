"""Requests go to the tokenizer with the least left to do."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.message import DetokenizeOnly, Shutdown, TokenizeOnly
from minisgl.tokenizer.dispatch import BASE_WORK, LeastLoaded, WorkCounter, work_of


class Inbox:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def pool(folder: Path, size: int) -> tuple[LeastLoaded, list[Inbox], list[WorkCounter]]:
    inboxes = [Inbox() for _ in range(size)]
    paths = [folder / f"work-{index}" for index in range(size)]
    theirs = [WorkCounter(path) for path in paths]
    return LeastLoaded(inboxes, [WorkCounter(path) for path in paths]), inboxes, theirs


def counts(inboxes: list[Inbox]) -> list[int]:
    return [len(inbox.sent) for inbox in inboxes]


def test_a_long_prompt_holds_up_nobody_else(tmp_path) -> None:
    sender, inboxes, _ = pool(tmp_path, 3)
    sender.send(TokenizeOnly(0, "x" * 2**24))
    for uid in range(1, 101):
        sender.send(TokenizeOnly(uid, "short"))
    assert counts(inboxes) == [1, 50, 50]


def test_what_is_done_makes_room(tmp_path) -> None:
    sender, inboxes, done = pool(tmp_path, 2)
    long = TokenizeOnly(0, "x" * 1000)
    sender.send(long)
    sender.send(TokenizeOnly(1, "short"))
    done[0].add(work_of(long))
    sender.send(TokenizeOnly(2, "short"))
    assert counts(inboxes) == [2, 1]


@given(sizes=st.lists(st.integers(0, 500), max_size=40), size=st.integers(1, 4))
def test_work_left_differs_by_no_more_than_one_message(tmp_path_factory, sizes, size) -> None:
    sender, inboxes, _ = pool(tmp_path_factory.mktemp("work"), size)
    for uid, length in enumerate(sizes):
        sender.send(TokenizeOnly(uid, "x" * length))
    assert sum(counts(inboxes)) == len(sizes)
    loads = [sum(map(work_of, inbox.sent)) for inbox in inboxes]
    assert max(loads) - min(loads) <= 500 + BASE_WORK


def test_a_counter_is_one_number_for_both_processes(tmp_path) -> None:
    first, second = WorkCounter(tmp_path / "x"), WorkCounter(tmp_path / "x")
    first.add(5)
    first.add(2**40)
    assert second.value == 5 + 2**40
    first.close()
    assert WorkCounter(tmp_path / "x").value == second.value


@pytest.mark.parametrize(
    ("message", "work"),
    [
        (Shutdown(), 0),
        (TokenizeOnly(0, "x" * 50), 50),
        (TokenizeOnly(0, [1] * 80), 10),
        (DetokenizeOnly(0, [1] * 80), 80),
        (TokenizeOnly(0, [{"role": "user", "content": "x" * 50}]), 50 + BASE_WORK),
        (TokenizeOnly(0, [{"content": [{"text": "x"}, {"text": 5}, 7]}]), 1 + BASE_WORK),
        (TokenizeOnly(0, [{"content": None}, 5, {}]), 3 * BASE_WORK),
        (TokenizeOnly(0, []), 0),
    ],
)
def test_work_is_about_the_characters(message, work) -> None:
    assert work_of(message) == BASE_WORK + work
