"""Which decode kernel serves a launch. Pure functions: no torch.

Measured on one H200 inside a replayed CUDA graph, bf16, head dim 128, microseconds a layer:

| rows and their tokens      | q/kv heads | group | tensor cores | CUDA cores          |
|----------------------------|------------|-------|--------------|---------------------|
| 1 of 4096                  | 16/8       | 2     | 11.8         | 9.6                 |
| 64 of 450 to 1350          | 16/8       | 2     | 63           | 71                  |
| 256 of 450 to 1350         | 16/8       | 2     | 221          | 252                 |
| 64 of 4096 to 12288        | 32/4       | 8     | 270          | 755                 |
| 256 of 450 to 1350         | 40/8       | 5     | 224          | refuses the group   |

Tensor cores compute all query heads of a group with one read of K and V, so they win as soon as
the reads are what counts. A few rows of a small group are quicker without them. Between 1 and 64
rows nothing was measured, nor with one query head a KV head, where a tile of tensor cores is
mostly padding: there the rule takes CUDA cores, as FlashInfer's documentation advises.
"""

from typing import Literal

from minisgl_attn_flashinfer.modules import CUDA_CORE_GROUPS

DecodeKernel = Literal["tensor", "cuda"]

_CUDA_CORE_ROWS = {1: None, 2: 4, 3: 4}
"""By group size: most rows for which CUDA cores are taken; ``None`` is any number."""


def choose_decode_kernel(rows: int, group: int, available: frozenset[DecodeKernel]) -> DecodeKernel:
    """Return the kernel for a decode launch of ``rows`` rows.

    Args:
        rows: rows of the launch, padding included.
        group: query heads per KV head.
        available: the kernels that were loaded, at least one; ``cuda`` only if the CUDA-core
            kernels take ``group``.
    """
    assert group in CUDA_CORE_GROUPS or "cuda" not in available
    if len(available) == 1:
        return next(iter(available))
    limit = _CUDA_CORE_ROWS.get(group, 0)
    return "cuda" if limit is None or rows <= limit else "tensor"
