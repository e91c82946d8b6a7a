"""Builds a model of transformers without initialising its parameters."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from minisgl.models.hf import attention

_DYNAMIC_ROPE = ("dynamic", "longrope")
"""Kinds whose frequencies depend on the longest sequence so far: on the others of a batch."""


def build(
    hf_config: Any, dtype: torch.dtype, device: torch.device, attention_name: str = attention.NAME
) -> PreTrainedModel:
    """Return the causal language model of a configuration, for inference.

    Parameters are allocated in ``dtype`` and not filled; buffers hold what transformers computes.
    ``hf_config`` is left as it is.
    """
    config = deepcopy(hf_config)
    # Whatever a training run left behind: nobody here reads router logits or attention weights.
    for extra in ("output_router_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, extra, False):
            setattr(config, extra, False)
    attention.register()
    with device, _NoInitialization():
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention_name, trust_remote_code=False
        )
    model.requires_grad_(requires_grad=False)
    # Nothing is padded; with this, some families look for padding in every batch. Others insist.
    with suppress(StrictDataclassError):
        model.config.pad_token_id = None
    for module in model.modules():
        _fix_frequencies(module)
    return model.eval()


def has_dynamic_rope(hf_config: Any) -> bool:
    """Whether ``build`` fixes frequencies that transformers would change with the lengths."""
    values = getattr(hf_config, "rope_parameters", None) or {}
    kinds = [values.get("rope_type")]
    kinds += [part.get("rope_type") for part in values.values() if isinstance(part, dict)]
    return any(kind in _DYNAMIC_ROPE for kind in kinds)


def _fix_frequencies(module: nn.Module) -> None:
    """Keep the frequencies of short sequences, which a rotary embedding starts with."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        for layer, kind in kinds.items():
            kinds[layer] = "default" if kind in _DYNAMIC_ROPE else kind
    elif kinds in _DYNAMIC_ROPE:
        setattr(module, "rope_type", "default")  # noqa: B010  (a name that nn.Module lacks)


class _NoInitialization(TorchFunctionMode):
    """Leaves parameters as they were allocated: what would fill one in place does nothing.

    Only in this thread, and only for parameters: buffers are computed as ever.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place and isinstance(target, nn.Parameter):
            return target
        return func(*args, **kwargs)
