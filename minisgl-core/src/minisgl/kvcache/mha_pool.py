"""The standard KV pool: K and V of all layers in two tensors, layout ``NHD``."""

import math

import numpy as np
import torch

from minisgl.errors import DoesNotFitError
from minisgl.kernel.reference import store_kv
from minisgl.kvcache.interface import KVCachePool, KVPoolSpec


class MHAKVCachePool(KVCachePool):
    """K and V as ``[layers, pages, page_size, kv_heads, head_dim]`` each, zero-initialised."""

    def __init__(self, spec: KVPoolSpec) -> None:
        self.spec = spec
        self.num_pages = 0
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._flat: list[tuple[torch.Tensor, torch.Tensor]] = []

    @classmethod
    def bytes_per_page(cls, spec: KVPoolSpec) -> int:
        """Bytes of one page over all layers, K and V together."""
        tokens = spec.page_size * spec.num_layers
        return 2 * tokens * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize

    def allocate(self, num_pages: int) -> None:
        """Allocate ``num_pages`` zeroed pages; see the interface."""
        self._layers, self._flat = [], []
        spec = self.spec
        shape = (spec.num_layers, num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
        try:
            k, v = (_zeros(shape, spec.dtype, spec.device) for _ in range(2))
        except (RuntimeError, MemoryError) as error:
            gib = num_pages * self.bytes_per_page(spec) / 2**30
            raise DoesNotFitError(
                f"a KV pool of {num_pages} pages needs {gib:.1f} GiB, which {spec.device} does not "
                f"have; lower cache.num_pages or engine.memory_fraction ({error})"
            ) from error
        self.num_pages = num_pages
        self._layers = list(zip(k.unbind(0), v.unbind(0), strict=True))
        self._flat = [(a.flatten(0, 1), b.flatten(0, 1)) for a, b in self._layers]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one layer, ``[pages, page_size, kv_heads, head_dim]`` each."""
        return self._layers[index]

    def flat_layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one layer by slot, ``[slots, kv_heads, head_dim]`` each."""
        return self._flat[index]

    def store(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, layer: int) -> None:
        """Write K and V of one launch to its slots; see the interface."""
        store_kv(k, v, slots, *self._flat[layer])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a zeroed tensor; in main memory one that takes no more than what is written to it.

    torch.zeros writes every byte. numpy asks the system for zeroed memory, which comes page by
    page when it is first touched.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size, alignment = math.prod(shape) * dtype.itemsize, 64
    buffer = np.zeros(size + alignment, dtype=np.uint8)
    offset = -buffer.ctypes.data % alignment
    return torch.from_numpy(buffer[offset : offset + size]).view(dtype).view(shape)
