"""The offline front door: ``LLM`` and ``AsyncLLM`` hold a scheduler of their own."""

from minisgl.llm.async_llm import AsyncLLM
from minisgl.llm.llm import LLM
from minisgl.llm.results import (
    GenerationChunk,
    GenerationProgress,
    GenerationResult,
    Logprob,
    Prompt,
    TokenLogprobs,
)

__all__ = [
    "LLM",
    "AsyncLLM",
    "GenerationChunk",
    "GenerationProgress",
    "GenerationResult",
    "Logprob",
    "Prompt",
    "TokenLogprobs",
]
