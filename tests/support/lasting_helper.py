"""Grammar engines that share the process in which they compile: it takes seconds to start."""

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from minisgl.request import GrammarSpec
from minisgl.structured import xgrammar_backend
from minisgl.structured.xgrammar_worker import Outcome, WorkerArguments


@contextlib.contextmanager
def lasting_helpers() -> Iterator[None]:
    """Let all engines for one tokenizer use one helper, which outlives them, until this ends.

    What is tested with it may not be the helper's life: ``core/structured/test_xgrammar.py`` does.
    """
    original = xgrammar_backend._Helper
    started: dict[bytes, tuple[Any, bytes]] = {}

    class Lasting:
        def __init__(self, arguments: WorkerArguments) -> None:
            key = pickle.dumps(arguments)
            if key not in started or not started[key][0].alive:
                helper = original(arguments)
                started[key] = helper, helper.wait_ready()
            self._helper, self._vocabulary = started[key]

        @property
        def alive(self) -> bool:
            return bool(self._helper.alive)

        def wait_ready(self) -> bytes:
            return self._vocabulary

        def run(self, spec: GrammarSpec, timeout: float) -> Outcome:
            return self._helper.run(spec, timeout)

        def stop(self) -> None:
            """Go on: the next engine wants it."""

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(xgrammar_backend, "_Helper", Lasting)
            yield
    finally:
        for helper, _ in started.values():
            helper.stop()
