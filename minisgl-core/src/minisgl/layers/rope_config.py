"""The parameters of a rotary embedding. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding parameters, in transformers 5's ``rope_parameters`` terms.

    Attributes:
        rope_type: ``default``, ``linear``, ``dynamic``, ``yarn``, ``longrope``, ``llama3``,
            ``proportional``.
        theta: base of the frequencies.
        rotary_dim: elements of a head that are rotated.
        original_max_position: context length before scaling.
        parameters: the rest, by transformers' names (``factor``, ``attention_factor``, ...).
    """

    rope_type: str
    theta: float
    rotary_dim: int
    original_max_position: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
