"""Which tensors of a checkpoint fill which parameters of a model of transformers.

Mostly the names are equal. Where a family's modelling code has changed since its checkpoints were
published (experts that are one parameter now, other prefixes), transformers has rules for reading
the old names; they are followed here as far as they can be: renaming, stacking of experts, and the
concatenation of equal parts.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key

from minisgl.errors import ModelLoadError
from minisgl.layers.base import Piece

_STACK, _CONCATENATE = "MergeModulelist", "Concatenate"
_NUMBER = re.compile(r"(\d+)")


def whole(name: str, shape: Iterable[int]) -> Piece:
    """Return the piece of a tensor that fills a parameter alone."""
    return Piece(name, tuple(shape), (), ())


def pieces_for(
    model: PreTrainedModel, names: Iterable[str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[Piece]]:
    """Return what fills each tensor of the model, by its name; nothing for what stays unfilled.

    Args:
        model: built, filled or not.
        names: of the checkpoint's tensors.
        shapes: of the model's tensors, by name.

    Raises:
        ModelLoadError: the family's checkpoints are converted in a way that is not followed.
    """
    transforms = get_model_conversion_mapping(model)
    converters = [rule for rule in transforms if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in transforms if not isinstance(rule, WeightConverter)]
    places: dict[str, list[Piece]] = defaultdict(list)
    parts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    # Experts are stacked in the order of their numbers.
    for name in sorted(names, key=_natural):
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, dict(shapes)
        )
        if target not in shapes:
            continue
        if pattern is None:
            places[target].append(whole(name, shapes[target]))
        else:
            parts[target][pattern].append(name)
    for target, pieces in places.items():
        if len(pieces) > 1:
            both = " and ".join(piece.name for piece in pieces)
            raise ModelLoadError(f"{both} are all names of {target}; the checkpoint holds it twice")
    for target, by_pattern in parts.items():
        rule = next(r for r in converters if set(by_pattern) <= set(r.source_patterns))
        places[target] = _converted(target, shapes[target], rule, by_pattern)
    return places


def _converted(
    target: str, shape: tuple[int, ...], rule: Any, by_pattern: Mapping[str, list[str]]
) -> list[Piece]:
    """Return the pieces of a parameter ``[experts, ...]`` that a rule makes of many tensors."""
    operations = [(type(step).__name__, getattr(step, "dim", None)) for step in rule.operations]
    patterns = [pattern for pattern in rule.source_patterns if pattern in by_pattern]
    stacked = operations == [(_STACK, 0)] and len(patterns) == 1
    joined = operations == [(_STACK, 0), (_CONCATENATE, 1)] and not shape[1] % len(patterns)
    if not stacked and not joined:
        steps = ", ".join(name for name, _ in operations)
        raise ModelLoadError(
            f"{target} is made of {', '.join(rule.source_patterns)} by {steps}, which minisgl does "
            "not follow; load the model with transformers and call save_pretrained with "
            "save_original_format=False, or use a plugin that offers the architecture"
        )
    for pattern, names in by_pattern.items():
        if len(names) != shape[0]:
            raise ModelLoadError(
                f"{target} stacks {shape[0]} tensors {pattern}, but the checkpoint has "
                f"{len(names)}, the first of them {names[0]}"
            )
    length = shape[1] // len(patterns)
    return [
        Piece(name, (length, *shape[2:]), (), (expert, slice(at * length, (at + 1) * length)))
        for at, pattern in enumerate(patterns)
        for expert, name in enumerate(by_pattern[pattern])
    ]


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort numbers in names as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _NUMBER.split(name)]
