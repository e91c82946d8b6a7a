"""Compilations: shared, cached, limited in time and number, and never in anybody's way."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from minisgl.errors import RequestError
from minisgl.request import GrammarSpec
from minisgl.structured import CompiledGrammar, Matcher, compiler
from minisgl.structured.compiler import Compilation, GrammarCompiler


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
    deadline = time.monotonic() + 30
    while not all(one.done for one in compilations):
        assert time.monotonic() < deadline
        of.poll()
        of.wait(0.01)


def test_one_compilation_serves_all_that_wait_and_all_that_follow() -> None:
    gate = threading.Event()

    def work(spec: GrammarSpec) -> CompiledGrammar:
        gate.wait(30)
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


def test_the_time_to_make_the_engine_does_not_count() -> None:
    def create() -> Backend:
        time.sleep(0.3)
        return Backend()

    of = GrammarCompiler(create, timeout_s=0.01)
    compiler_grace = compiler._GRACE_S
    try:
        compiler._GRACE_S = 0.0  # type: ignore[misc]
        one = of.submit(spec("a"))
        finish(of, one)
    finally:
        compiler._GRACE_S = compiler_grace  # type: ignore[misc]
    assert one.grammar is not None


def test_threads_that_hang_are_replaced_until_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler, "_GRACE_S", 0.0)
    monkeypatch.setattr(compiler, "MAX_LOST_THREADS", 3)
    gate = threading.Event()

    def work(spec: GrammarSpec) -> CompiledGrammar:
        if spec.value.startswith("hang"):
            gate.wait(60)
        return Grammar()

    of = GrammarCompiler(lambda: Backend(work), timeout_s=0.02)
    hanging = [of.submit(spec(f"hang{i}")) for i in range(3)]
    fine = of.submit(spec("fine"))
    finish(of, *hanging, fine)
    assert fine.grammar is not None
    for one in hanging:
        assert one.error is not None
        assert "cannot be compiled within 0.02 s" in one.error.message
    with pytest.raises(RequestError, match="3 compilations hang") as refused:
        of.submit(spec("another"))
    assert refused.value.status == 503
    assert of.submit(spec("fine")).done, "what is cached is still served"
    gate.set()  # they return after all
    deadline = time.monotonic() + 30
    while of._num_lost:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    finish(of, of.submit(spec("another")))


def test_closing_stops_the_engine_once_it_is_there() -> None:
    gate = threading.Event()
    backend = Backend()

    def create() -> Backend:
        gate.wait(30)
        return backend

    of = GrammarCompiler(create)
    of.submit(spec("a"))
    of.close()
    gate.set()
    deadline = time.monotonic() + 30
    while not backend.closed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not backend.specs
    of.close()


def test_without_an_engine_the_reason_is_given() -> None:
    with pytest.raises(RequestError, match="grammar cannot be obeyed") as refused:
        GrammarCompiler(None, off="structured.backend is none").submit(spec("a"))
    assert refused.value.param == "grammar"
    assert refused.value.status == 400
