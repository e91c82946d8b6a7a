"""From a launch's arguments to the compiled kernel, without what Triton does anew at each launch.

Triton binds arguments to names, prints what it would compile for into a string, looks that up, and
compares all globals of the kernel: much of the host's work in a prefill of few tokens. Here the
same facts are a tuple. Whatever is new or unusual takes Triton's own way: see ``Dispatcher``.

Relies on how the launcher of a compiled kernel is called, as ``CompiledKernel.__getitem__`` of
Triton 3.6 does it (https://github.com/triton-lang/triton, python/triton/compiler/compiler.py). With
another version everything takes Triton's way.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from types import NoneType
from typing import Any, Final

import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_VERSION: Final = "3.6."
_LEAST, _MOST = -(2**31), 2**31 - 1
_OTHERS: Final = frozenset({float, bool, NoneType})


class Dispatcher:
    """A kernel that is launched as ever: ``kernel[grid](*arguments, **options)``.

    The key of a compiled kernel is never coarser than Triton's: dtype and alignment of each tensor,
    dtype and block of each descriptor, type and divisibility of each number, the constants, the
    options, the device. So two launches of one key run what Triton would have run for either.
    Triton's own way take the first launch of a key, launches that a profiler's hooks observe,
    numbers beyond 32 bits, and arguments of other kinds, or by name.

    Settings of Triton that change while the process runs reach only kernels that are new then.

    Args:
        kernel: the function that Triton compiles.
    """

    __slots__ = ("_compiled", "_constants", "_kernel", "_num_arguments", "_numbers", "_tensors")

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._num_arguments = len(kernel.params)
        self._constants = _picker([one.num for one in kernel.params if one.is_constexpr])
        self._tensors: Callable[[Sequence[Any]], tuple[Any, ...]] | None = None
        self._numbers: Callable[[Sequence[Any]], tuple[Any, ...]] = _picker([])
        self._compiled: dict[tuple[Any, ...] | None, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return what launches the kernel with ``grid``."""
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        active = driver.active
        device = active.get_current_device()
        key = self._key(device, arguments, options)
        compiled = self._compiled.get(key)
        if compiled is None or _is_observed():
            compiled = self._kernel[grid](*arguments, **options)
            if key is not None and isinstance(compiled, CompiledKernel):
                self._compiled[key] = compiled
            return
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        function, metadata = compiled.function, compiled.packed_metadata
        compiled.run(x, y, z, stream, function, metadata, None, None, None, *arguments)

    def _key(
        self, device: int, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """Return the key of a launch, or ``None`` if it is unusual."""
        if self._tensors is None:
            self._sort(arguments)
            assert self._tensors is not None
        if len(arguments) != self._num_arguments:
            return None
        facts = [device, *options.items(), *self._constants(arguments)]
        for number in self._numbers(arguments):
            kind = type(number)
            facts.append(kind)
            if kind is int:
                if not _LEAST <= number <= _MOST:
                    return None
                facts.append("one" if number == 1 else number & 15 == 0)
            elif kind not in _OTHERS:
                return None
        try:
            for tensor in self._tensors(arguments):
                if type(tensor) is TensorDescriptor:
                    facts.append(_described(tensor))
                    continue
                facts.append(tensor.dtype)
                facts.append(tensor.data_ptr() & 15)
        except AttributeError:
            return None
        return tuple(facts)

    def _sort(self, arguments: Sequence[Any]) -> None:
        """Note at the first launch which arguments are tensors, or descriptors of some."""
        others = [one.num for one in self._kernel.params if not one.is_constexpr]
        others = [place for place in others if place < len(arguments)]
        tensors = [place for place in others if _is_memory(arguments[place])]
        self._numbers = _picker([place for place in others if place not in tensors])
        self._tensors = _picker(tensors)


def _is_memory(argument: Any) -> bool:
    return hasattr(argument, "data_ptr") or type(argument) is TensorDescriptor


def _described(descriptor: Any) -> tuple[Any, ...]:
    """Return what a kernel is compiled for of a tensor that it copies by descriptor."""
    return descriptor.base.dtype, *descriptor.block_shape, descriptor.padding


def dispatched(kernel: Any) -> Any:
    """Return ``kernel`` with quick launches, or as it is where they are not known to be sound."""
    if isinstance(kernel, JITFunction) and triton.__version__.startswith(_VERSION):
        return Dispatcher(kernel)
    return kernel


def _is_observed() -> bool:
    """Whether anybody wants to be told of each launch."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if getattr(hook, "calls", hook):  # a chain of them, or what somebody has put in its place
            return True
    return False


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return what picks the arguments at ``places``, quickly."""
    if len(places) > 1:
        return itemgetter(*places)
    if places:
        return lambda arguments: (arguments[places[0]],)
    return lambda _: ()
