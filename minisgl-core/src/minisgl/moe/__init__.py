"""Routed experts: the interfaces of backends and of exchanges between ranks, and core's own.

Names load lazily, so that plugins can name this package without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.moe.exchange import DispatchedTokens, ExchangeContext, ExpertExchange
    from minisgl.moe.fp8 import ExpertScales, dequantize_rows, quantize_rows, quantize_stack
    from minisgl.moe.interface import MoeBackend, MoeContext, TuneRequest
    from minisgl.moe.placement import ExpertPlacement

__all__ = [
    "DispatchedTokens",
    "ExchangeContext",
    "ExpertExchange",
    "ExpertPlacement",
    "ExpertScales",
    "MoeBackend",
    "MoeContext",
    "TuneRequest",
    "dequantize_rows",
    "quantize_rows",
    "quantize_stack",
]

_LAZY = {
    "DispatchedTokens": "minisgl.moe.exchange",
    "ExchangeContext": "minisgl.moe.exchange",
    "ExpertExchange": "minisgl.moe.exchange",
    "ExpertPlacement": "minisgl.moe.placement",
    "ExpertScales": "minisgl.moe.fp8",
    "MoeBackend": "minisgl.moe.interface",
    "MoeContext": "minisgl.moe.interface",
    "TuneRequest": "minisgl.moe.interface",
    "dequantize_rows": "minisgl.moe.fp8",
    "quantize_rows": "minisgl.moe.fp8",
    "quantize_stack": "minisgl.moe.fp8",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
