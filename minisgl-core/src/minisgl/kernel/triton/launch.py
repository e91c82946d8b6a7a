"""What kernels, and the wrappers around them, share."""

from typing import Final

import torch
import triton
import triton.language as tl

OVERLAP: Final = torch.cuda.is_available() and all(
    torch.cuda.get_device_capability(device) >= (9, 0)
    for device in range(torch.cuda.device_count())
)
"""Launch while the kernel before still runs (programmatic dependent launch, capability 9.0).

Only where every device can: a kernel does not know for which one it will be compiled.
A kernel then waits inside, once it is on the device. With one row of Qwen3-0.6B on an H200 a decode
step took 947 us instead of 1,144.
"""

_OVERLAP = tl.constexpr(OVERLAP)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def factors(stride: int) -> tuple[int, int]:
    """Return ``(n, 16)`` for a stride of ``16 * n`` elements, ``(stride, 1)`` for any other.

    The first goes to a kernel as an argument, because torch may give a dimension of one entry any
    stride, and nothing should be compiled for that; the second is compiled in, and tells the
    compiler that rows begin where accesses of 16 bytes may.
    """
    return (stride // 16, 16) if stride % 16 == 0 else (stride, 1)


@triton.jit
def wait_for_inputs():
    """Wait for the kernel before this one: nothing may be read or written earlier."""
    if _OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def multiply_add(a, b, total):
    """Return ``a @ b + total`` in float32. The interpreter multiplies the bits of bfloat16."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total)
