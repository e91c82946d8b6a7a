"""Tensor-parallel collectives behind one small interface.

Names load lazily, so that plugins can name this package without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.distributed.communicator import Communicator, SingleCommunicator

__all__ = ["Communicator", "SingleCommunicator"]

_LAZY = {
    "Communicator": "minisgl.distributed.communicator",
    "SingleCommunicator": "minisgl.distributed.communicator",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
