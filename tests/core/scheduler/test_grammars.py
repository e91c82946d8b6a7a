"""Rows with a grammar: when they are launched, how they end, and that nobody else notices."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given

from minisgl.engine.plan import BatchPlan
from minisgl.request import GrammarSpec
from minisgl.scheduler import grammars
from minisgl.structured import MaskArray
from minisgl.structured.compiler import Compilation, GrammarCompiler
from support.audit import Audit, Feed
from support.fake_engine import EOS, generate
from support.patience import PATIENCE
from support.schedules import Ask, plain, run, schedules, set_ups
from support.scheduling import Harness
from support.server_process import wait_for
from support.toy_grammar import (
    VOCAB,
    InlineCompiler,
    ToyBackend,
    ToyGrammar,
    ToyMatcher,
    allowed,
)


class CommittedTokensOnly(Audit):
    """Every mask is for a row whose last token is committed, and no such row goes without one."""

    num_masks = 0

    def launched(self, plan: BatchPlan, feeds: list[Feed]) -> None:
        table, masked = self.scheduler.table, set(plan.mask_rows.tolist())
        assert len(masked) == len(plan.mask_rows)
        self.num_masks += len(masked)
        for feed in feeds:
            wants = table.owner(feed.row).params.grammar is not None and feed.sampled
            assert (feed.row in masked) == wants
            masked.discard(feed.row)
            if wants:  # all that it has been fed is what the host knows
                assert feed.start + feed.length == table.num_tokens[feed.row]
        assert not masked, "a mask for a row that gets no token"


@example(plain(overlap=True), [Ask(1, (2,), 1), Ask(1, (2,), 1), Ask(0, (2,), 3, grammar="1:2")])
@example(  # the second one is retracted
    plain(rows=2, budget=5, cache="naive"),
    [
        Ask(0, (2, 3, 4, 5, 2, 3, 4), 12, ignore_eos=True),
        Ask(0, (2, 3, 4, 5) * 3 + (2, 2), 7, grammar="2:4"),
    ],
)
@given(set_ups(max_spare=1), schedules(with_aborts=True, max_size=9))
def test_invariant_21_a_masked_row_is_launched_when_its_last_token_is_committed(
    set_up: dict[str, Any], schedule: list[Ask]
) -> None:
    """Any overlap, chunks, retractions, aborts.

    Catches: a mask made before the token that it depends on, a row launched twice in a row, a mask
    sent for an inner chunk, a retracted row that is resumed without one.
    """
    run(set_up, schedule, CommittedTokensOnly())


def decode_launches(harness: Harness) -> list[set[int]]:
    """Rows of each step's decode launch; they do not change their owners in these tests."""
    order: list[int] = []
    launches = []
    for plan in harness.engine.plans:
        order = order if plan.decode_rows is None else plan.decode_rows.tolist()
        launches.append(set(order) if plan.num_decode_rows else set())
    return launches


@pytest.mark.parametrize("overlap", [True, False])
def test_masked_rows_join_every_second_step_and_the_others_every_one(overlap: bool) -> None:
    harness = Harness(overlap=overlap, rows=5, budget=40, num_pages=400)
    for uid in range(5):
        grammar = GrammarSpec("grammar", f"{uid + 7}:30") if uid % 2 else None
        harness.submit(uid, [2, 3, uid + 2], max_tokens=20, ignore_eos=True, grammar=grammar)
    harness.step()
    rows = {request.uid: request.row for request in harness.scheduler.table.requests if request}
    free, masked = {rows[0], rows[2], rows[4]}, {rows[1], rows[3]}
    for _ in range(12):
        harness.step()
    launches = decode_launches(harness)[1:]
    assert all(free <= launch for launch in launches)
    joins = [masked <= launch for launch in launches]
    assert all(
        not masked & launch for launch, joined in zip(launches, joins, strict=True) if not joined
    )
    expected = [place % 2 == 1 for place in range(len(joins))] if overlap else [True] * len(joins)
    assert joins == expected


def test_new_masked_rows_keep_nobody_out() -> None:
    """One comes with every step. Catches: a launch that waits until all of them are ready."""
    harness = Harness(rows=12, budget=40, num_pages=400)
    harness.submit(0, [2, 3], max_tokens=24, grammar=GrammarSpec("grammar", "7:30"))
    steps = 0
    while not harness.clients[0].reasons:
        steps += 1
        harness.submit(
            steps, [2, steps % 8 + 2], max_tokens=3, grammar=GrammarSpec("grammar", "1:9")
        )
        harness.step()
        assert steps < 60
    assert harness.clients[0].tokens == generate([2, 3], 24, grammar="7:30")
    assert steps <= 2 * len(harness.clients[0].tokens) + 4


class Saboteur(ToyMatcher):
    """Goes wrong after three tokens."""

    def __init__(self, how: str) -> None:
        super().__init__(3, 9)
        self._how = how

    def fill_mask(self, mask: MaskArray) -> None:
        super().fill_mask(mask)
        if len(self.output) == 3:
            if self._how == "fill":
                raise RuntimeError("sabotage")
            if self._how == "nothing":
                mask[:] = 0
            if self._how == "slow":
                began = time.thread_time()
                while time.thread_time() - began < 2 * grammars.BUDGET_S:
                    pass

    def accept(self, token_id: int) -> bool:
        if len(self.output) == 3 and self._how == "accept":
            raise RuntimeError("sabotage")
        if len(self.output) == 3 and self._how == "refuse":
            return False
        return super().accept(token_id)


class OneGrammar(InlineCompiler):
    """Every grammar is this one."""

    def __init__(self, make: Callable[[], ToyMatcher]) -> None:
        super().__init__()
        self._make = make

    def submit(self, spec: GrammarSpec, *, wants_vocabulary: bool = False) -> Compilation:
        compilation = Compilation(spec)
        compilation.grammar, compilation.done = ToyGrammar(self._make), True
        return compilation


@pytest.mark.parametrize(
    ("how", "num_tokens", "message"),
    [
        ("fill", 3, "the grammar engine failed: sabotage"),
        ("nothing", 3, "no token may come next"),
        ("slow", 3, "to follow 3 tokens; make it less ambiguous"),
        ("accept", 4, "the grammar engine failed: sabotage"),
        ("refuse", 4, "came, which it does not allow"),
    ],
)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_mask_that_goes_wrong_ends_that_request_alone(
    how: str, num_tokens: int, message: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "slow":
        monkeypatch.setattr(grammars, "BUDGET_S", 0.1)
    harness = Harness(compiler=OneGrammar(lambda: Saboteur(how)), overlap=overlap)
    prompts = {0: [2, 3], 1: [2, 4], 2: [5]}
    for uid, prompt in prompts.items():
        grammar = GrammarSpec("grammar") if uid == 1 else None
        harness.submit(uid, prompt, max_tokens=10, ignore_eos=True, grammar=grammar)
    harness.finish()
    assert harness.clients[1].reasons == ["error"]
    assert message in harness.clients[1].failures[0]
    assert len(harness.clients[1].tokens) == num_tokens
    for uid in (0, 2):
        assert harness.clients[uid].tokens == generate(prompts[uid], 10, stop_ids=frozenset())


FIRST = sorted(allowed(7, 3, []))
SECOND = {token: sorted(allowed(7, 3, [token])) for token in FIRST}


@pytest.mark.parametrize(
    ("params", "num_tokens"),
    [
        ({"logit_bias": dict.fromkeys(FIRST, -100.0)}, 0),
        ({"bad_token_ids": tuple((token,) for token in FIRST)}, 0),
        ({"allowed_token_ids": tuple({*range(2, VOCAB)} - {*FIRST})}, 0),
        (
            {
                "bad_token_ids": tuple(
                    (first, second) for first, after in SECOND.items() for second in after
                )
            },
            1,
        ),
    ],
)
def test_a_request_whose_own_fields_leave_no_token_is_told_so(
    params: dict[str, Any], num_tokens: int
) -> None:
    harness = Harness(compiler=InlineCompiler())
    harness.submit(0, [2, 3], max_tokens=10, grammar=GrammarSpec("grammar", "7:3"), **params)
    harness.submit(1, [2, 4], max_tokens=10)
    harness.finish()
    assert harness.clients[0].reasons == ["error"]
    assert (
        "bad_words, allowed_token_ids, min_tokens and ignore_eos leave none"
        in (harness.clients[0].failures[0])
    )
    assert harness.clients[0].statuses == [400]
    assert len(harness.clients[0].tokens) == num_tokens
    assert harness.clients[1].tokens == generate([2, 4], 10)


def test_a_matcher_that_cannot_be_made_ends_its_request() -> None:
    def fail() -> ToyMatcher:
        raise RuntimeError("no matcher")

    harness = Harness(compiler=OneGrammar(fail))
    harness.submit(0, [2], grammar=GrammarSpec("grammar"))
    harness.finish()
    assert harness.clients[0].failures == ["the grammar engine failed: no matcher"]


class Finished(ToyMatcher):
    """Needs no end-of-sequence token."""

    @property
    def finished(self) -> bool:  # type: ignore[override]
        return len(self.output) == 4


def test_a_text_that_is_over_ends_without_an_end_of_sequence_token() -> None:
    harness = Harness(compiler=OneGrammar(lambda: Finished(3, 9)))
    harness.submit(0, [2], grammar=GrammarSpec("grammar"))
    harness.finish()
    assert harness.clients[0].reasons == ["stop"]
    assert len(harness.clients[0].tokens) == 4
    assert EOS not in harness.clients[0].tokens


def test_allowed_token_ids_and_a_grammar_hold_both() -> None:
    harness = Harness()
    only = (1, 4, 5, 6, 7)
    grammar = GrammarSpec("grammar", "2:4")
    harness.submit(0, [2, 3], max_tokens=8, allowed_token_ids=only, grammar=grammar)
    harness.finish()
    assert set(harness.clients[0].tokens) <= set(only)
    matcher = ToyMatcher(2, 4)
    assert all(matcher.accept(token) for token in harness.clients[0].tokens)


class Gate:
    """A backend whose compilations wait until they are let through."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.compiled: list[str] = []

    def compile(self, spec: GrammarSpec) -> ToyGrammar:
        assert self.open.wait(PATIENCE)
        self.compiled.append(spec.value)
        return ToyBackend().compile(spec)  # type: ignore[return-value]

    def close(self) -> None:
        self.open.set()


def test_nobody_waits_for_a_compilation_but_its_request() -> None:
    gate = Gate()
    compiler = GrammarCompiler(lambda: gate)
    harness = Harness(compiler=compiler, rows=1)
    harness.submit(0, [2, 3], max_tokens=4, grammar=GrammarSpec("grammar", "1:2"))
    harness.submit(1, [2, 3], max_tokens=6, ignore_eos=True)
    for _ in range(10):
        harness.step()
    assert harness.clients[1].reasons == ["length"]
    assert harness.scheduler.num_waiting == 0
    assert harness.scheduler.has_work
    assert not harness.clients[0].tokens
    gate.open.set()
    harness.finish()
    assert harness.clients[0].tokens == generate([2, 3], 4, grammar="1:2")


def test_an_abort_during_a_compilation() -> None:
    gate = Gate()
    harness = Harness(compiler=GrammarCompiler(lambda: gate))
    for uid in range(4):  # two are being compiled, two wait for a thread
        harness.submit(uid, [2, 3], grammar=GrammarSpec("grammar", f"{uid}:2"))
    harness.step()
    for uid in range(4):
        harness.abort(uid)
    harness.step()
    assert all(harness.clients[uid].reasons == ["abort"] for uid in range(4))
    assert not harness.scheduler.has_work
    harness.submit(9, [2, 3], max_tokens=4, grammar=GrammarSpec("grammar", "9:2"))
    gate.open.set()
    harness.finish()
    assert harness.clients[9].tokens == generate([2, 3], 4, grammar="9:2")
    wait_for(lambda: len(gate.compiled) >= 3, "the compilations that were begun")
    assert set(gate.compiled) == {"0:2", "1:2", "9:2"}, "what nobody waits for is not begun"


def test_an_abort_that_overtakes_its_request_is_obeyed() -> None:
    gate = Gate()
    harness = Harness(compiler=GrammarCompiler(lambda: gate))
    harness.abort(0)
    harness.submit(0, [2, 3], grammar=GrammarSpec("grammar", "1:2"))
    harness.step()
    assert harness.clients[0].reasons == ["abort"]
    assert not harness.scheduler.has_work
    gate.open.set()


def test_a_compilation_that_hangs_ends_its_requests_and_the_rest_goes_on() -> None:
    gate = Gate()
    harness = Harness(compiler=GrammarCompiler(lambda: gate, timeout_s=0.01))
    harness.submit(0, [2, 3], grammar=GrammarSpec("grammar", "1:2"))
    harness.submit(1, [2, 3], grammar=GrammarSpec("grammar", "1:2"))
    harness.submit(2, [2, 3], max_tokens=5, ignore_eos=True)
    harness.finish()
    for uid in (0, 1):
        assert harness.clients[uid].reasons == ["error"]
        assert "cannot be compiled within 0.01 s" in harness.clients[uid].failures[0]
    assert harness.clients[2].reasons == ["length"]
    gate.open.set()


def test_without_an_engine_a_grammar_is_refused_and_all_else_is_served() -> None:
    off = GrammarCompiler(None, off="needs the package xgrammar")
    harness = Harness(compiler=off)
    harness.submit(0, [2, 3], grammar=GrammarSpec("json_object"))
    harness.submit(1, [2, 3], max_tokens=2, ignore_eos=True)
    harness.finish()
    assert harness.clients[0].failures == ["grammar cannot be obeyed: needs the package xgrammar"]
    assert harness.clients[1].reasons == ["length"]
