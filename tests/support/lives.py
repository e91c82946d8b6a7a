"""State machines of hypothesis with lives that are played in every run, beside those it draws."""

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis.stateful import INITIALIZE_RULE_MARKER, RuleBasedStateMachine

Life = Callable[[Any], None]
"""Calls the rules of a machine, as hypothesis prints them; the invariants are looked at between."""


class _Watched:
    """A machine whose invariants are looked at behind each rule, as hypothesis does it."""

    def __init__(self, machine: RuleBasedStateMachine) -> None:
        self._machine = machine
        self._invariants = [invariant.function for invariant in machine.invariants]

    def __getattr__(self, name: str) -> Callable[..., None]:
        rule = getattr(self._machine, name)

        def call(**arguments: Any) -> None:
            rule(**arguments)
            # Invariants hold once all that begins a life is done, and to its end.
            if name != "teardown" and not hasattr(rule, INITIALIZE_RULE_MARKER):
                for invariant in self._invariants:
                    invariant(self._machine)

        return call


def machine_tests(machine: type[RuleBasedStateMachine], *lives: Life, steps: int) -> type:
    """Return a test case: one test of ``lives``, and one of as many drawn lives as the profile has.

    Args:
        machine: whose rules and invariants they are.
        lives: each must hold; they are those that known faults do not survive.
        steps: at most, of a drawn life.
    """

    class Lives(machine.TestCase):  # type: ignore[misc,name-defined]
        settings = settings(stateful_step_count=steps)
        test_drawn_lives = machine.TestCase.runTest

        def test_known_lives(self) -> None:
            for life in lives:
                state = _Watched(machine())
                life(state)
                state.teardown()

    return Lives
