"""Compares quick launches with Triton's own; a script, without interpreter or card.

Prints as JSON how many keys random launches have of either kind, launches whose quick key stands
for two of Triton's, and what reaches a kernel's launcher by either way.
"""

import itertools
import json
import random
import sys
from typing import Any

import torch
import triton
from triton import knobs
from triton import language as tl
from triton.runtime import driver, jit
from triton.tools.tensor_descriptor import TensorDescriptor

from minisgl.kernel.triton.dispatch import Dispatcher
from support.compile_kernels import AbsentCard


@triton.jit(do_not_specialize=["loose_ptr", "loose"])
def kernel(exact_ptr, loose_ptr, exact, loose, real, first: tl.constexpr, second: tl.constexpr):
    """Uses all that it gets."""
    value = tl.load(loose_ptr).to(tl.float32) + exact + loose + real + first + second
    tl.store(exact_ptr, value.to(exact_ptr.dtype.element_ty))


@triton.jit
def copying_kernel(x, out_ptr):
    """Uses what is copied."""
    tl.store(out_ptr + tl.arange(0, 8), tl.sum(x.load([0, 0]), axis=0))


def triton_key(arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    _, keys, _, _, binder = kernel.device_caches[0]
    options = {
        **options,
        "debug": knobs.runtime.debug,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
    }
    _, specialization, parsed = binder(*arguments, **options)
    key: str = jit.compute_cache_key(keys, specialization, parsed)
    return key


def compare(num_launches: int) -> dict[str, Any]:
    choose = random.Random(0)
    memory = {dtype: torch.zeros(64, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)}
    tensors = [tensor[at:] for tensor in memory.values() for at in (0, 1, 4, 8, 9)]
    numbers = [0, 1, 2, 8, 16, 17, 48, -1, -16, -15, 2**31 - 1, -(2**31), 2**31, 2**40, 2**63, True]
    constants = [0, 1, True, False, 1.0, 16, None, "a"]
    described = [
        TensorDescriptor(tensor, [size, 8], [8, 1], [rows, 8], padding)
        for tensor in memory.values()
        for size in (4, 8)
        for rows in (4, 8)
        for padding in ("zero", "nan")
    ]
    pools: tuple[list[Any], ...] = (
        [*tensors, None, *described],
        [*tensors, None, *described],
        [*numbers, None, 1.5, tensors[0], tensors[1], described[0]],
        [*numbers, None, 1.5],
        [0.0, 1.0, 1e300, 1, None],
        constants,
        constants,
    )
    options = [
        dict(zip(("num_warps", "launch_pdl"), values, strict=True))
        for values in itertools.product((4, 8), (True, False))
    ]
    # As the first launch shows it: two tensors, then numbers.
    usual = (tensors[0], tensors[0], 3, 5, 1.0, 1, 2)
    dispatcher = Dispatcher(kernel)
    dispatcher._key(0, usual, options[0])
    found: dict[Any, str] = {}
    conflicts, unusual = [], 0
    for _ in range(num_launches):
        # Most of it as usual: so that keys are met again.
        launch = list(usual)
        for place in choose.sample(range(len(pools)), choose.randint(0, 3)):
            launch[place] = choose.choice(pools[place])
        some = choose.choice(options)
        key = dispatcher._key(0, tuple(launch), some)
        if key is None:
            unusual += 1
            continue
        own = triton_key(tuple(launch), some)
        if found.setdefault(key, own) != own:
            conflicts.append([str(launch), own, found[key]])
    return {
        "keys": len(found),
        "of_triton": len(set(found.values())),
        "unusual": unusual,
        "conflicts": conflicts[:5],
    }


class NotingCard(AbsentCard):
    """A card whose kernels are compiled and loaded, and whose launches are noted."""

    def __init__(self) -> None:
        super().__init__(90)
        self.launches: list[tuple[Any, ...]] = []
        self.utils = self

    def get_current_stream(self, device: int) -> int:
        return 77 + device

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        del source, metadata

        def launch(*arguments: Any) -> None:
            self.launches.append(arguments)

        return launch

    def load_binary(self, name: str, *_: Any) -> tuple[Any, ...]:
        return name, 4711, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**17 + device}


def launch_described() -> bool:
    """Launch with a descriptor, both ways; return whether a launcher gets the same, and when."""
    card = NotingCard()
    driver.set_active(card)
    x = TensorDescriptor(torch.zeros(8, 8), [8, 8], [8, 1], [4, 8])
    out = torch.zeros(64)
    dispatcher = Dispatcher(copying_kernel)
    copying_kernel[3,](x, out)
    for _ in range(2):
        dispatcher[3,](x, out)
    assert len(dispatcher._compiled) == 1
    by_triton, *quick = ([*one[:6], *one[9:]] for one in card.launches)
    return quick == [by_triton] * 2


def launch_both_ways() -> list[list[Any]]:
    """Launch a kernel by Triton's way and by the quick one; return what its launcher got."""
    card = NotingCard()
    driver.set_active(card)
    x = torch.zeros(64)
    dispatcher = Dispatcher(kernel)
    for grid in ((3,), (4, 5), (6, 7, 8)):
        arguments = (x, x[1:], 3, 16, 0.5, 1, 2)
        kernel[grid](*arguments, num_warps=8)
        for _ in range(2):
            dispatcher[grid](*arguments, num_warps=8)
    told = []
    runtime = knobs.runtime
    runtime.launch_enter_hook.add(told.append)
    dispatcher[grid](*arguments, num_warps=8)
    runtime.launch_enter_hook.remove(told.append)
    (hooked,) = card.launches[9:]
    assert callable(hooked[7]), "its launcher calls the hook, with what is to be told"
    found = []
    for one in card.launches[:9]:
        # Grid, stream, function, metadata; what observers get; tensors and numbers.
        shown = [
            value.data_ptr() - x.data_ptr() if isinstance(value, torch.Tensor) else value
            for value in (*one[:6], *one[9:])
        ]
        found.append([*shown, [value is None for value in one[6:9]]])
    return found


if __name__ == "__main__":
    driver.set_active(AbsentCard(90))
    result = compare(int(sys.argv[1]))
    kernel.device_caches.clear()
    result["launches"] = launch_both_ways()
    result["described"] = launch_described()
    sys.stdout.write(json.dumps(result))
