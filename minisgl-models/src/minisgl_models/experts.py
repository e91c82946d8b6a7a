"""From a Hugging Face configuration to ``MoeConfig``: what the families with experts share."""

from typing import Any

from minisgl.errors import ModelLoadError
from minisgl.models.config import ExpertNames, MoeConfig

QWEN_NAMES = ExpertNames()
MIXTRAL_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


def sparse_layers(config: Any) -> frozenset[int]:
    """Return the layers with experts, as ``decoder_sparse_step`` and ``mlp_only_layers`` say.

    Raises:
        ModelLoadError: ``decoder_sparse_step`` is below 1.
    """
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers or ())
    if step < 1:
        raise ModelLoadError(
            f"decoder_sparse_step={step} in config.json must be 1 or more: every layer of that "
            "number has experts"
        )
    return frozenset(
        index
        for index in range(config.num_hidden_layers)
        if index not in dense and (index + 1) % step == 0
    )


def read_experts(
    config: Any,
    *,
    layers: frozenset[int],
    num_experts_field: str = "num_experts",
    size_field: str = "moe_intermediate_size",
    renormalize: bool,
    shared_size: int | None = None,
    names: ExpertNames = QWEN_NAMES,
) -> MoeConfig | None:
    """Return the experts of a configuration; ``None`` if no layer has any.

    Args:
        config: a transformers configuration.
        layers: numbers of the layers that would have experts.
        num_experts_field: of their number.
        size_field: of the inner elements of one.
        renormalize: divide the chosen experts' weights by their sum.
        shared_size: inner elements of the expert that all tokens visit.
        names: in checkpoints.

    Raises:
        ModelLoadError: a token cannot choose so many experts, or an expert has no elements.
    """
    num_experts, top_k = getattr(config, num_experts_field), config.num_experts_per_tok
    if not num_experts or not layers:
        return None
    if not 1 <= top_k <= num_experts:
        raise ModelLoadError(
            f"num_experts_per_tok={top_k} in config.json must lie between 1 and "
            f"{num_experts_field}={num_experts}"
        )
    sizes = {size_field: getattr(config, size_field)}
    if shared_size is not None:
        sizes["shared_expert_intermediate_size"] = shared_size
    for field, size in sizes.items():
        if size < 1:
            raise ModelLoadError(f"{field}={size} in config.json must be 1 or more")
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=sizes[size_field],
        renormalize=renormalize,
        layers=layers,
        shared_intermediate_size=shared_size,
        names=names,
    )
