"""The table of small fused operations; torch references always, faster ones above them.

Names load lazily, so that plugins can name this package without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.kernel.jit import JitLoader
    from minisgl.kernel.ops import OpTable
    from minisgl.kernel.rotation import Rotation

__all__ = ["JitLoader", "OpTable", "Rotation"]

_LAZY = {
    "JitLoader": "minisgl.kernel.jit",
    "OpTable": "minisgl.kernel.ops",
    "Rotation": "minisgl.kernel.rotation",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
