"""Compilations: shared, cached, limited in time and number, and never in anybody's way."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from minisgl.errors import RequestError
from minisgl.request import GrammarSpec
from minisgl.structured import CompiledGrammar, Matcher, compiler
from minisgl.structured.compiler import Compilation, GrammarCompiler
from support.patience import PATIENCE
from support.server_process import wait_for


class Grammar:
    def __init__(self, num_bytes: int = 10) -> None:
        self.num_bytes = num_bytes

    def matcher(self) -> Matcher:
        raise NotImplementedError


class Backend:
    """Compiles by a function, and counts."""

    def __init__(self, work: Callable[[GrammarSpec], CompiledGrammar] = lambda spec: Grammar()):
        self.work = work
        self.specs: list[GrammarSpec] = []
        self.closed = 0

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        self.specs.append(spec)
        return self.work(spec)

    def close(self) -> None:
        self.closed += 1


def spec(value: str) -> GrammarSpec:
    return GrammarSpec("regex", value)


def finish(of: GrammarCompiler, *compilations: Compilation) -> None:
    def over() -> bool:
        of.poll()
        of.wait(0.01)
        return all(one.done for one in compilations)

    wait_for(over, "the compilations")


def test_one_compilation_serves_all_that_wait_and_all_that_follow() -> None:
    gate = threading.Event()

    def work(spec: GrammarSpec) -> CompiledGrammar:
        gate.wait(PATIENCE)
        return Grammar()

    backend = Backend(work)
    of = GrammarCompiler(lambda: backend)
    first, second, other = of.submit(spec("a")), of.submit(spec("a")), of.submit(spec("b"))
    assert first is second
    assert not first.done
    gate.set()
    finish(of, first, other)
    later = of.submit(spec("a"))
    assert later.done
    assert later.grammar is first.grammar is not None
    assert sorted(one.value for one in backend.specs) == ["a", "b"]


def test_the_kind_is_part_of_the_key() -> None:
    of = GrammarCompiler(Backend)
    one, other = of.submit(GrammarSpec("regex", "a")), of.submit(GrammarSpec("grammar", "a"))
    finish(of, one, other)
    assert one.grammar is not other.grammar


def test_the_cache_keeps_what_was_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_CACHED", 2)
    backend = Backend()
    of = GrammarCompiler(lambda: backend)
    for value in ("a", "b", "a", "c", "a", "b"):
        finish(of, of.submit(spec(value)))
    assert [one.value for one in backend.specs] == ["a", "b", "c", "b"]


def test_the_cache_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_CACHED_BYTES", 100)
    backend = Backend(lambda spec: Grammar(200 if spec.value == "huge" else 40))
    of = GrammarCompiler(lambda: backend)
    for value in ("a", "b", "c", "b", "c", "huge", "huge", "b"):
        finish(of, of.submit(spec(value)))
    assert [one.value for one in backend.specs] == ["a", "b", "c", "huge", "huge", "b"]


def test_what_is_wrong_with_a_grammar_is_said_each_time() -> None:
    def refuse(spec: GrammarSpec) -> CompiledGrammar:
        raise RequestError("no such thing", param="grammar")

    backend = Backend(refuse)
    of = GrammarCompiler(lambda: backend)
    for _ in range(2):
        one = of.submit(spec("a"))
        finish(of, one)
        assert one.error is not None
        assert (one.error.message, one.error.status, one.error.param) == (
            "no such thing", 400, "grammar",
        )  # fmt: skip
    assert len(backend.specs) == 2


def test_an_engine_that_breaks_is_a_500_and_is_asked_again() -> None:
    outcomes: Iterator[Exception | Grammar] = iter([ValueError("broken"), Grammar()])

    def work(spec: GrammarSpec) -> CompiledGrammar:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    of = GrammarCompiler(lambda: Backend(work))
    one = of.submit(spec("a"))
    finish(of, one)
    assert one.error is not None
    assert one.error.status == 500
    assert "broken" in one.error.message
    again = of.submit(spec("a"))
    finish(of, again)
    assert again.grammar is not None


def test_an_engine_that_cannot_be_made_is_tried_again() -> None:
    attempts = []

    def create() -> Backend:
        attempts.append(1)
        if len(attempts) == 1:
            raise RuntimeError("no helper")
        return Backend()

    of = GrammarCompiler(create)
    one = of.submit(spec("a"))
    finish(of, one)
    assert one.error is not None
    assert "no helper" in one.error.message
    again = of.submit(spec("a"))
    finish(of, again)
    assert again.grammar is not None


class Clock:
    """The time of compilations, which passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(compiler, "time", SimpleNamespace(monotonic=lambda: self.now))

    def give_up(self, of: GrammarCompiler, *compilations: Compilation) -> None:
        """Let the limit of these pass, which are all that run, once they run."""
        wait_for(lambda: all(one.began is not None for one in compilations), "the beginning")
        self.now += 1000
        of.poll()
        assert all(one.done for one in compilations)


def test_the_time_to_make_the_engine_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, gate = Clock(monkeypatch), threading.Event()

    def create() -> Backend:
        gate.wait(PATIENCE)
        return Backend()

    of = GrammarCompiler(create)
    one = of.submit(spec("a"))
    clock.now += 1000
    of.poll()
    assert not one.done
    gate.set()
    finish(of, one)
    assert one.grammar is not None


def test_threads_that_hang_are_replaced_until_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(compiler, "MAX_LOST_THREADS", 3)
    gate = threading.Event()

    def work(spec: GrammarSpec) -> CompiledGrammar:
        if spec.value.startswith("hang"):
            gate.wait(PATIENCE)
        return Grammar()

    of = GrammarCompiler(lambda: Backend(work), timeout_s=0.02)
    hanging = [of.submit(spec(f"hang{i}")) for i in range(3)]
    fine = of.submit(spec("fine"))
    clock.give_up(of, *hanging[:2])
    finish(of, fine)
    assert fine.grammar is not None
    clock.give_up(of, hanging[2])
    for one in hanging:
        assert one.error is not None
        assert "cannot be compiled within 0.02 s" in one.error.message
    with pytest.raises(RequestError, match="3 compilations hang") as refused:
        of.submit(spec("another"))
    assert refused.value.status == 503
    assert of.submit(spec("fine")).done, "what is cached is still served"
    gate.set()  # they return after all
    wait_for(lambda: not of._num_lost, "the threads")
    finish(of, of.submit(spec("another")))


def test_closing_stops_the_engine_once_it_is_there() -> None:
    gate = threading.Event()
    backend = Backend()

    def create() -> Backend:
        gate.wait(PATIENCE)
        return backend

    of = GrammarCompiler(create)
    of.submit(spec("a"))
    of.close()
    gate.set()
    wait_for(lambda: backend.closed, "the end of the engine")
    assert not backend.specs
    of.close()


def test_without_an_engine_the_reason_is_given() -> None:
    with pytest.raises(RequestError, match="grammar cannot be obeyed") as refused:
        GrammarCompiler(None, off="structured.backend is none").submit(spec("a"))
    assert refused.value.param == "grammar"
    assert refused.value.status == 400
