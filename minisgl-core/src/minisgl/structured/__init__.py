"""Text of a given form: the interface of grammar engines, and what compiles grammars for requests.

An engine turns a ``GrammarSpec`` into a ``CompiledGrammar``, and that makes a ``Matcher`` for each
request: it says which tokens may come next. Core's own engine is ``minisgl.structured.xgrammar``.
"""

from minisgl.structured.interface import (
    CompiledGrammar,
    GrammarBackend,
    GrammarContext,
    MaskArray,
    Matcher,
    mask_words,
)

__all__ = [
    "CompiledGrammar",
    "GrammarBackend",
    "GrammarContext",
    "MaskArray",
    "Matcher",
    "mask_words",
]
