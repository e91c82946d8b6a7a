"""Which decode rows are told to share a prefix, and when; invariant 22: they do share it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minisgl.attention.batch import MAX_SHARED_GROUPS, list_groups
from minisgl.scheduler import sharing
from minisgl.scheduler.decode import DecodeSet
from minisgl.scheduler.sharing import PrefixSharing
from minisgl.scheduler.table import TableManager
from support.schedules import Ask, answers, plain, run, schedules, set_ups

PAGE = 4


class Rows:
    """Decode rows with the pages given, and 4 tokens behind them."""

    def __init__(self, pages: list[list[int]]) -> None:
        longest = max(map(len, pages))
        self.table = TableManager(len(pages), PAGE * (longest + 2), PAGE)
        for row, some in enumerate(pages):
            self.table.pages[row, : len(some)] = some
            self.table.pages[row, len(some) :] = 999  # of an earlier owner
            self.table.num_pages[row] = len(some)
            self.table.launched[row] = PAGE * len(some)

    def order(self, rows: list[int] | None = None) -> DecodeSet:
        chosen = np.array(range(len(self.table.requests)) if rows is None else rows)
        nothing = np.empty(0, dtype=np.int64)
        return DecodeSet(
            rows=chosen, rows32=chosen.astype(np.int32), uids=chosen, uid_bytes=b"",
            watched=nothing, stop_ids=np.empty((0, 0), dtype=np.int32),
            obeys_eos=np.ones(len(chosen), dtype=np.bool_), lengths=self.table.launched[chosen],
            full_at=nothing,
        )  # fmt: skip

    def sharing(self, min_tokens: int | None = 1) -> PrefixSharing:
        return PrefixSharing(self.table, PAGE, min_tokens)

    def found(self, min_tokens: int | None = 1) -> dict[frozenset[int], int] | None:
        """Rows of each group, and the tokens that they share."""
        groups = self.sharing(min_tokens).of(self.order(), 0)
        if groups is None:
            return None
        members: dict[int, set[int]] = {}
        for row, group in enumerate(groups.group_of.tolist()):
            members.setdefault(group, set()).add(row)
        return {
            frozenset(rows): int(groups.tokens[group])
            for group, rows in members.items()
            if group >= 0
        }


def test_rows_with_the_same_first_pages_are_a_group() -> None:
    rows = Rows([[1, 2, 3, 10], [1, 2, 3, 11], [7, 8, 9], [1, 2, 3, 12]])
    assert rows.found() == {frozenset({0, 1, 3}): 12}


def test_what_an_earlier_owner_left_behind_a_rows_pages_is_not_shared() -> None:
    assert Rows([[1, 2], [1, 2], [5]]).found() == {frozenset({0, 1}): 8}


def test_groups_are_those_that_save_most() -> None:
    """All begin with one page, and two pairs of them have long prefixes."""
    documents = [[1, *range(20, 30), 50], [1, *range(20, 30), 51], [1, *range(30, 40), 52]]
    rows = Rows([*documents, [1, *range(30, 40), 53], [1, 54]])
    assert rows.found() == {frozenset({0, 1}): 44, frozenset({2, 3}): 44}
    many = Rows([[1, 2, 3, 4, 5, row + 100] for row in range(6)] + [[1, 2, 3, 4, 5, 6, 7]] * 2)
    assert many.found() == {frozenset(range(8)): 20}, "two more pages of two rows save less"


def test_it_must_save_as_many_tokens_as_are_asked_for() -> None:
    rows = Rows([[1, 2, 3, row + 100] for row in range(3)])
    assert rows.found(24) == {frozenset({0, 1, 2}): 12}
    assert rows.found(25) is None
    assert rows.found(None) is None, "the engine has no use for groups"


def test_it_must_save_an_eighth_of_all_tokens() -> None:
    alone = list(range(100, 200))
    assert Rows([[1, 2, 3], [1, 2, 4], alone]).found() is None
    assert Rows([[1, 2, 3], [1, 2, 4], alone[:10]]).found() is not None


def test_no_more_groups_than_a_launch_takes() -> None:
    prefixes = [[100 + number] * (number + 1) for number in range(20) for _ in (0, 1)]
    found = Rows([[*prefix, 1000 + row] for row, prefix in enumerate(prefixes)]).found()
    assert found is not None
    assert len(found) == MAX_SHARED_GROUPS
    assert min(found.values()) == 5 * PAGE, "those that save least are left out"


def test_rows_that_leave_take_nothing_along() -> None:
    """The groups stay, whoever of them leaves; a group of one is none."""
    rows = Rows([[1, 2, 3, row + 100] for row in range(4)])
    look = rows.sharing()
    first = look.of(rows.order(), 0)
    assert first is not None
    assert look.of(rows.order([1, 2, 3]), 0).group_of.tolist() == [0, 0, 0]  # type: ignore[union-attr]
    look.forget(np.array([2], dtype=np.int32))
    rest = look.of(rows.order([1, 2, 3]), 0)
    assert rest is not None
    assert rest.group_of.tolist() == [0, -1, 0], "row 2 has a new owner"
    assert look.of(rows.order([2, 3]), 0) is None


def test_nothing_is_compared_while_nothing_changes() -> None:
    rows = Rows([[1, 2, 3, row + 100] for row in range(4)])
    look, order = rows.sharing(), rows.order()
    groups = look.of(order, 0)
    rows.table.pages[:] = np.arange(rows.table.pages.size).reshape(rows.table.pages.shape)
    assert all(look.of(order, 0) is groups for _ in range(20))


def test_rows_that_are_moved_onto_cached_pages_are_found_within_a_few_steps() -> None:
    rows = Rows([[1, 2, 3, 10], [4, 5, 6, 11]])
    look, order = rows.sharing(), rows.order()
    assert look.of(order, 0) is None
    rows.table.pages[1, :3] = rows.table.pages[0, :3]
    assert any(look.of(order, 1) for _ in range(sharing._STEPS_BETWEEN_LOOKS + 1))


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=12), st.integers(0, 3))
def test_groups_are_listed_as_kernels_read_them(of_rows: list[int], spare: int) -> None:
    tokens = np.array([16, 48, 32, 64], dtype=np.int32)
    group_of = np.array(of_rows, dtype=np.int32)
    members, groups, starts = list_groups(group_of, tokens, len(of_rows) + spare)
    for group, (first, count, shared) in enumerate(groups[:4].tolist()):
        assert members[first : first + count].tolist() == np.flatnonzero(group_of == group).tolist()
        assert shared == tokens[group]
    assert not groups[4:, 1].any()
    expected = [int(tokens[group]) if group >= 0 else 0 for group in of_rows]
    assert starts.tolist() == expected + [0] * spare


ALIKE = (2, 3, 4, 5, 6, 7, 8, 9)


@pytest.mark.parametrize("between_looks", [1, 8])
@example(
    set_up=plain(rows=3, budget=40, num_pages=120, shares=True),
    schedule=[Ask(place, (*ALIKE, 2 + place), 12, ignore_eos=True) for place in range(3)],
)
@example(  # all at once: each computes its prompt, then has the first one's pages
    set_up=plain(rows=3, budget=40, num_pages=120, shares=True, overlap=True),
    schedule=[Ask(0, (*ALIKE, 2 + place), 12, ignore_eos=True) for place in range(3)],
)
@example(  # the row of the second one gets an owner that shares nothing
    set_up=plain(rows=2, budget=40, num_pages=120, shares=True),
    schedule=[
        Ask(0, (*ALIKE, 2), 24, ignore_eos=True),
        Ask(0, (*ALIKE, 3), 12, ignore_eos=True),
        Ask(0, (9, 8, 7, 6, 5, 4, 3, 2, 3, 4), 6, ignore_eos=True),
    ],
)
@given(set_up=set_ups(), schedule=schedules(with_aborts=True))
def test_invariant_22_rows_told_to_share_a_prefix_have_its_pages(
    between_looks: int, set_up: dict[str, Any], schedule: list[Ask]
) -> None:
    """The engine checks it at every launch, and reads prefixes through the first row of a group.

    Catches: a row that keeps its group after it has a new owner, groups of an order that is gone,
    a prefix as long as the row, pages of an earlier owner that look shared.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "_STEPS_BETWEEN_LOOKS", between_looks)
        harness = run({**set_up, "shares": True}, schedule)
    for ask, (tokens, reasons) in zip(schedule, answers(harness, schedule), strict=True):
        assert tokens == ask.tokens[: len(tokens)]
        assert ask.abort_after is not None or (tokens, reasons) == (ask.tokens, [ask.reason])


def test_groups_are_told_and_told_again_when_rows_come_and_go() -> None:
    schedule = [
        Ask(place, (*ALIKE, 2 + place), 24 - 3 * place, ignore_eos=True) for place in range(4)
    ]
    harness = run(plain(rows=4, budget=40, num_pages=160, shares=True), schedule)
    assert answers(harness, schedule) == [(ask.tokens, [ask.reason]) for ask in schedule]
    assert harness.engine.num_shared_launches > 8
    told = [plan for plan in harness.engine.plans if len(plan.shared_groups)]
    assert 2 <= len(told) <= 8, "only when something has changed"
