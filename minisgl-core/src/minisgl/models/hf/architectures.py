"""The causal language models that transformers has, by name and without importing any."""

import ast
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_MODULE = "transformers.models.auto.modeling_auto"
_NAMES = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


def known_architectures() -> frozenset[str]:
    """Return the architecture of every causal language model in transformers."""
    pairs = None if _MODULE in sys.modules else written_names()
    names: dict[str, Any] = getattr(import_module(_MODULE), _NAMES) if pairs is None else pairs
    return frozenset(names.values())


def written_names() -> dict[str, str] | None:
    """Read the architecture of each model type from the source; ``None`` if it spells out none.

    The module that holds them imports text generation in transformers 5.17, which takes seconds.
    """
    spec = find_spec(_MODULE)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    source = Path(spec.origin).read_text(encoding="utf-8")
    _, found, rest = source.partition(f"\n{_NAMES} = OrderedDict(")
    literal, closed, _ = rest.partition("\n)\n")
    if not (found and closed):
        return None
    try:
        return dict(ast.literal_eval(literal.strip()))
    except (ValueError, SyntaxError, TypeError):
        return None
