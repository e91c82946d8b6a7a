"""Attention over a paged KV pool: the interface, and core's own reference backend.

Names load lazily, so that plugins can name this package without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.attention.batch import Batch
    from minisgl.attention.block_tables import BlockTables
    from minisgl.attention.hybrid import HybridBackend
    from minisgl.attention.interface import (
        AttentionBackend,
        AttentionContext,
        AttentionLayerSpec,
        CudaGraphSupport,
    )

__all__ = [
    "AttentionBackend",
    "AttentionContext",
    "AttentionLayerSpec",
    "Batch",
    "BlockTables",
    "CudaGraphSupport",
    "HybridBackend",
]

_LAZY = {
    "AttentionBackend": "minisgl.attention.interface",
    "AttentionContext": "minisgl.attention.interface",
    "AttentionLayerSpec": "minisgl.attention.interface",
    "CudaGraphSupport": "minisgl.attention.interface",
    "Batch": "minisgl.attention.batch",
    "BlockTables": "minisgl.attention.block_tables",
    "HybridBackend": "minisgl.attention.hybrid",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
