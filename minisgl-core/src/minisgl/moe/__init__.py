"""Routed experts: the interface, and core's own reference backend.

Names load lazily, so that plugins can name this package without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.moe.interface import MoeBackend, MoeContext, TuneRequest

__all__ = ["MoeBackend", "MoeContext", "TuneRequest"]

_LAZY = dict.fromkeys(__all__, "minisgl.moe.interface")


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
