"""The parameters of routed experts, and their names in checkpoints. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a family's published checkpoints name the experts of a layer, below the layer's name.

    Attributes:
        block: the module that has the router (``gate``) and the experts (``experts.N``).
        gate, up, down: the projections of an expert.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Routed experts of a model.

    Attributes:
        num_experts: routed experts a layer.
        top_k: experts a token.
        intermediate_size: inner elements of one expert.
        renormalize: divide the chosen experts' weights by their sum.
        layers: numbers of the layers that have experts.
        shared_intermediate_size: inner elements of the expert that all tokens visit; ``None``:
            there is no such expert.
        names: in checkpoints.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    layers: frozenset[int]
    shared_intermediate_size: int | None = None
    names: ExpertNames = ExpertNames()
