"""Quick launches of Triton's kernels: of a fake one, and beside Triton's own way without a card."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor

from minisgl.kernel.triton import dispatch
from minisgl.kernel.triton.dispatch import Dispatcher, dispatched


class FakeCompiled:
    """What a kernel has been compiled to; notes its launches."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.launches.append(arguments)


class FakeKernel:
    """A kernel of two tensors, a number and a constant, which Triton compiles at every launch."""

    def __init__(self) -> None:
        self.params = [SimpleNamespace(num=place, is_constexpr=place == 3) for place in range(4)]
        self.compiled: list[FakeCompiled] = []
        self.refuses = False

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., FakeCompiled | None]:
        def launch(*_: Any, **__: Any) -> FakeCompiled | None:
            self.compiled.append(FakeCompiled())
            return None if self.refuses else self.compiled[-1]

        return launch


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The driver, with a device that a test may change."""
    driver = SimpleNamespace(device=2)
    driver.get_current_device = lambda: driver.device
    driver.get_current_stream = lambda device: 100 + device
    monkeypatch.setattr(dispatch, "driver", SimpleNamespace(active=driver))
    monkeypatch.setattr(dispatch, "CompiledKernel", FakeCompiled)
    return driver


X = torch.zeros(64)
DESCRIBED = TensorDescriptor(X, [8, 8], [8, 1], [4, 8])
USUAL = (X, X, 7, "constant")


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel()


@pytest.fixture
def quick(kernel: FakeKernel, active: SimpleNamespace) -> Dispatcher:
    """A dispatcher whose kernel has been compiled for the usual launch."""
    dispatcher = Dispatcher(kernel)
    dispatcher[5,](*USUAL, num_warps=4)
    assert len(kernel.compiled) == 1
    return dispatcher


@pytest.mark.parametrize(
    ("grid", "filled"), [((5,), (5, 1, 1)), ((5, 6), (5, 6, 1)), ((5, 6, 7), (5, 6, 7))]
)
def test_a_launch_like_one_before_goes_straight_to_the_compiled_kernel(
    kernel: FakeKernel, quick: Dispatcher, grid: tuple[int, ...], filled: tuple[int, ...]
) -> None:
    others = (X[16:], X[32:], 9, "constant")
    quick[grid](*others, num_warps=4)
    quick[grid](*USUAL, num_warps=4)
    (compiled,) = kernel.compiled
    where = (*filled, 102, "function", "metadata", None, None, None)
    assert [one[:9] for one in compiled.launches] == [where] * 2
    assert all(one is other for one, other in zip(compiled.launches[0][9:], others, strict=True))


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((X.bfloat16(), X, 7, "constant"), {"num_warps": 4}),
        ((X, X[1:], 7, "constant"), {"num_warps": 4}),
        ((X, X, 1, "constant"), {"num_warps": 4}),
        ((X, X, 16, "constant"), {"num_warps": 4}),
        ((X, X, 7.0, "constant"), {"num_warps": 4}),
        ((X, X, None, "constant"), {"num_warps": 4}),
        ((X, X, 7, "other"), {"num_warps": 4}),
        ((X, X, 7, "constant"), {"num_warps": 8}),
        ((X, X, 7, "constant"), {"num_warps": 4, "launch_pdl": True}),
    ],
)
def test_whatever_a_kernel_is_compiled_for_leads_to_one_of_its_own(
    kernel: FakeKernel, quick: Dispatcher, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Catches: code for aligned rows that reads others, or for another dtype."""
    for _ in range(3):
        quick[5,](*arguments, **options)
    first, second = kernel.compiled
    assert not first.launches
    assert len(second.launches) == 2


@pytest.mark.parametrize("first", [USUAL, (DESCRIBED, *USUAL[1:])])
def test_descriptors_have_keys_by_what_they_copy(
    kernel: FakeKernel, active: SimpleNamespace, first: tuple[Any, ...]
) -> None:
    """Whichever a kernel is first launched with, a tensor or a descriptor of one."""
    del active
    quick = Dispatcher(kernel)
    quick[5,](*first)
    for place, described in enumerate(
        [
            DESCRIBED,
            replace(DESCRIBED, block_shape=[8, 8]),
            replace(DESCRIBED, base=X.half()),
            replace(DESCRIBED, padding="nan"),
        ],
        start=2 if first is USUAL else 1,
    ):
        for shape in ([8, 8], [4, 8]):
            quick[5,](replace(described, shape=shape), *USUAL[1:])
        assert len(kernel.compiled) == place
        assert kernel.compiled[-1].launches
    compiled = len(kernel.compiled)
    quick[5,](*USUAL)
    quick[5,](*USUAL)
    assert len(kernel.compiled) == compiled + (first is not USUAL)


def test_each_device_has_its_own(
    kernel: FakeKernel, quick: Dispatcher, active: SimpleNamespace
) -> None:
    active.device = 3
    for _ in range(2):
        quick[5,](*USUAL, num_warps=4)
    assert [one[3] for one in kernel.compiled[1].launches] == [103]


@pytest.mark.parametrize(
    "arguments",
    [
        (X, X, 2**31, "constant"),
        (X, X, -(2**31) - 1, "constant"),
        (X, X, X, "constant"),
        (X, X, DESCRIBED, "constant"),
        (X, None, 7, "constant"),
        (X, X, 7),
    ],
)
def test_what_is_unusual_takes_tritons_way_each_time(
    kernel: FakeKernel, quick: Dispatcher, arguments: tuple[Any, ...]
) -> None:
    for _ in range(2):
        quick[5,](*arguments, num_warps=4)
    assert len(kernel.compiled) == 3
    assert not any(compiled.launches for compiled in kernel.compiled)


def test_nothing_is_kept_where_nothing_was_compiled(kernel: FakeKernel, quick: Dispatcher) -> None:
    """As where a hook compiles, or ends the launch."""
    kernel.refuses = True
    for _ in range(2):
        quick[5,](X, X, 7, "other", num_warps=4)
    assert len(kernel.compiled) == 3


def test_observers_of_launches_are_told_of_each(
    kernel: FakeKernel, quick: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a profiler that sees the first launch of each kernel alone."""
    for name in ("launch_enter_hook", "launch_exit_hook"):
        for hook in (SimpleNamespace(calls=[print]), print):
            with monkeypatch.context() as patch:
                patch.setattr(dispatch.knobs.runtime, name, hook)
                quick[5,](*USUAL, num_warps=4)
    assert len(kernel.compiled) == 5
    monkeypatch.setattr(dispatch.knobs.runtime, "launch_exit_hook", None)
    quick[5,](*USUAL, num_warps=4)
    assert len(kernel.compiled) == 5
    assert len(kernel.compiled[-1].launches) == 1, "the last one compiled serves"


def test_another_version_of_triton_and_its_interpreter_launch_as_they_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = FakeKernel()
    assert dispatched(kernel) is kernel
    monkeypatch.setattr(dispatch, "JITFunction", FakeKernel)
    monkeypatch.setattr(dispatch.triton, "__version__", "3.6.1")
    assert isinstance(dispatched(kernel), Dispatcher)
    monkeypatch.setattr(dispatch.triton, "__version__", "3.7.0")
    assert dispatched(kernel) is kernel


@pytest.mark.slow
def test_quick_launches_are_tritons_own() -> None:
    """Catches: a fact that Triton compiles for and the key lacks; arguments in another order.

    Random launches have equal keys only where Triton's are equal, and a launcher gets the same by
    either way, but for what tells observers.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    script = [sys.executable, "-m", "support.dispatch_keys", "20000"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["conflicts"] == []
    assert 20 < found["of_triton"] <= found["keys"] < found["unusual"] * 10
    assert found["described"]
    launches = found["launches"]
    assert len(launches) == 9
    for place in range(0, 9, 3):
        by_triton, *quick = (one[:-1] for one in launches[place : place + 3])
        assert quick == [by_triton] * 2
    # Observers are told by Triton, so at the first launch of the key too.
    told = [not one[-1][0] for one in launches]
    assert told == [True, True, False, True, False, False, True, False, False]
