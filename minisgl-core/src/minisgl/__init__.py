"""minisgl: an LLM inference and serving framework, made of a small core and plugins.

The public names load lazily, so that ``import minisgl`` costs milliseconds and imports neither
torch nor transformers: plugins and command lines start quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.llm import LLM, AsyncLLM, GenerationResult
    from minisgl.request import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncLLM", "GenerationResult", "SamplingParams", "__version__"]

_LAZY = {
    "LLM": "minisgl.llm",
    "AsyncLLM": "minisgl.llm",
    "GenerationResult": "minisgl.llm",
    "SamplingParams": "minisgl.request",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'minisgl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
