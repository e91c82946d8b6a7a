"""What a model of transformers asks of attention, found by running it once without data.

Configurations name windows, scales and caps in as many ways as there are families. The code that
uses them has one: the arguments of the attention interface. So a model is built on torch's meta
device, which computes shapes and nothing else, and each of its attention modules is asked.
"""

import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from minisgl.attention.interface import AttentionLayerSpec
from minisgl.errors import ModelLoadError
from minisgl.models.config import ModelFacts
from minisgl.models.hf.attention import SURVEY_NAME, Mask, answer_with, mask_of
from minisgl.models.hf.build import build, has_dynamic_rope

logger = logging.getLogger(__name__)

_NEEDED = "5.5"
"""The first transformers whose rotary embeddings run on the meta device."""

_NUM_TOKENS = 3
_FAR = 1 << 20
_REACHES = (0, *(1 << exponent for exponent in range(20)), _FAR)
"""How far a key may lie behind a query, to try out a mask."""
_LAYER_TYPES = ("full_attention", "sliding_attention")
_HARMLESS = frozenset(
    {"dropout", "scaling", "sliding_window", "softcap", "is_causal", "position_ids"}
)
"""Arguments of the attention interface that are understood, or change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(ModelFacts):
    """A model that transformers' code computes.

    Attributes:
        hf_config: its transformers configuration.
        attention: name of each attention module, in the order in which they run, and what it asks
            of attention.
    """

    hf_config: Any
    attention: tuple[tuple[str, AttentionLayerSpec], ...]


def read_config(hf_config: Any) -> TransformersConfig:
    """Return what the engine must know of a model of transformers.

    Raises:
        ModelLoadError: the model needs what our cache or attention does not offer; says what.
    """
    architecture = _check_class(hf_config)
    try:
        # In bfloat16, because torch's grouped products take nothing else on the meta device.
        model = build(hf_config, torch.bfloat16, torch.device("meta"), SURVEY_NAME)
        text_config = model.config.get_text_config()
        _check_kind(text_config)
        layers, vocab_size = _trace(model, text_config.num_hidden_layers)
        max_position = _max_position(architecture, text_config)
    except ModelLoadError:
        raise
    except _Unsupported as reason:
        raise _refusal(architecture, str(reason)) from None
    except Exception as error:  # whatever a family's code raises
        raise _refusal(
            architecture,
            f"its code does not run without data ({type(error).__name__}: {error}; transformers "
            f"{transformers.__version__}, and this needs {_NEEDED} or newer)",
        ) from error
    specs = [spec for _, spec in layers]
    first = specs[0]
    return TransformersConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        num_layers=len(specs),
        num_q_heads=first.num_q_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        max_position=max_position,
        sliding_windows=tuple(spec.sliding_window for spec in specs),
        logit_soft_cap=any(spec.logit_soft_cap is not None for spec in specs),
        dtype=str(getattr(hf_config, "dtype", None) or "float32").removeprefix("torch."),
        hf_config=hf_config,
        attention=tuple(layers),
    )


class _Unsupported(Exception):  # noqa: N818
    """Carries the reason out of transformers' code."""


def _refusal(architecture: str, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"{architecture} cannot run through transformers' modelling code: {reason}. It needs a "
        "plugin that offers the architecture (minisgl plugins list shows what is installed)"
    )


def _check_class(hf_config: Any) -> str:
    """Return the architecture, which must be the causal language model of its configuration."""
    cls = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    if cls is None or cls.__name__ not in hf_config.architectures:
        found = "none" if cls is None else cls.__name__
        raise _refusal(
            hf_config.architectures[0],
            f"the causal language model of model_type={hf_config.model_type!r} there is {found}",
        )
    architecture: str = cls.__name__
    parameters = inspect.signature(cls.forward).parameters
    for needed in ("position_ids", "logits_to_keep"):
        if needed not in parameters:
            raise _refusal(architecture, f"its forward takes no {needed}")
    if getattr(cls, "_is_stateful", False):
        raise _refusal(architecture, "it keeps a recurrent state, and only K and V are cached")
    return architecture


def _check_kind(config: Any) -> None:
    """Refuse what the arguments of attention do not show, because masks are never built."""
    types = set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES)
    if types:
        raise _Unsupported(
            f"it has layers of type {', '.join(sorted(map(str, types)))}; supported: "
            f"{', '.join(_LAYER_TYPES)}"
        )
    both_ways = getattr(config, "use_bidirectional_attention", False)
    if both_ways or not getattr(config, "is_causal", True):
        raise _Unsupported("its attention is not causal")


def _trace(
    model: PreTrainedModel, num_layers: int
) -> tuple[list[tuple[str, AttentionLayerSpec]], int]:
    """Run a model on the meta device; returns its attention modules and its number of logits."""
    layers: list[tuple[str, AttentionLayerSpec]] = []
    for name, module in model.named_modules():
        answer_with(module, _Recorder(name, layers))
    meta = torch.device("meta")
    with torch.inference_mode():
        output = model(
            input_ids=torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device=meta),
            position_ids=torch.arange(_NUM_TOKENS, device=meta).unsqueeze(0),
            # Without one, transformers would look at the positions, which hold no data.
            attention_mask=torch.ones(1, _NUM_TOKENS, dtype=torch.int64, device=meta),
            use_cache=False,
            logits_to_keep=torch.zeros(2, dtype=torch.int64, device=meta),
        )
    if not layers:
        raise _Unsupported("its layers do not use transformers' attention interface")
    if len(layers) != num_layers:
        raise _Unsupported(
            f"{len(layers)} of its {num_layers} layers attend, so the others keep another state"
        )
    _check_equal(layers)
    if output.logits.shape[:2] != (1, 2):
        raise _Unsupported("it does not restrict the head to the tokens that are sampled")
    return layers, int(output.logits.shape[-1])


def _check_equal(layers: list[tuple[str, AttentionLayerSpec]]) -> None:
    """One pool holds K and V of all layers: they must have one shape."""
    shapes = {(spec.num_q_heads, spec.num_kv_heads, spec.head_dim) for _, spec in layers}
    if len(shapes) > 1:
        listed = "; ".join(" ".join(map(str, shape)) for shape in sorted(shapes))
        raise _Unsupported(
            f"its layers differ in their numbers of q heads, KV heads or elements a head ({listed})"
        )


def _max_position(architecture: str, config: Any) -> int:
    """Return the longest sequence; only one that other sequences of a batch leave exact."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None:
        raise _Unsupported("its config.json states no max_position_embeddings")
    values = getattr(config, "rope_parameters", None) or {}
    original = getattr(config, "original_max_position_embeddings", None) or values.get(
        "original_max_position_embeddings", longest
    )
    if values.get("rope_type") == "yarn":
        return max(int(longest), int(original * (values.get("factor") or 1.0)))
    if not has_dynamic_rope(config):
        return int(longest)
    if original < longest:
        logger.warning(
            "%s is limited to the %d positions that it was first trained for: transformers' code "
            "rotates longer ones in a way that depends on the whole batch",
            architecture,
            original,
        )
    return int(min(original, longest))


def _hides_as_window(mask: Mask, window: int | None) -> bool:
    """Whether a mask lets a query at position i see the keys in (i - window, i] and no other."""
    reach = [*_REACHES, *(() if window is None else (window - 1, window, window + 1))]
    query = torch.tensor([_FAR + reach[-1]]).expand(len(reach) + 1)
    key = query - torch.tensor([-1, *reach])
    zero = torch.zeros_like(query)
    expected = key <= query
    if window is not None:
        expected &= key > query - window
    return torch.equal(mask(zero, zero, query, key).expand_as(expected), expected)


class _Recorder:
    """Answers for one module on the meta device: notes what is asked, returns an empty output."""

    def __init__(self, name: str, layers: list[tuple[str, AttentionLayerSpec]]) -> None:
        self._name = name
        self._layers = layers

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if any(name == self._name for name, _ in self._layers):
            raise _Unsupported(f"{self._name} attends more than once")
        self._check(module, kwargs)
        self._check_mask(attention_mask, kwargs.get("sliding_window"))
        self._check_shapes(query, key, value)
        scale, head_dim = kwargs.get("scaling"), query.shape[-1]
        window = kwargs.get("sliding_window")
        if window is not None and window < 1:
            raise _Unsupported(f"{self._name} has sliding_window={window!r}; it must be 1 or more")
        spec = AttentionLayerSpec(
            index=len(self._layers),
            num_q_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else float(scale),
            sliding_window=window,
            logit_soft_cap=kwargs.get("softcap"),
        )
        self._layers.append((self._name, spec))
        return query.new_empty(1, query.shape[2], query.shape[1], head_dim)

    def _check(self, module: nn.Module, kwargs: dict[str, Any]) -> None:
        causal = kwargs.get("is_causal")
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise _Unsupported(f"the attention of {self._name} is not causal")
        for name, value in kwargs.items():
            if name not in _HARMLESS and value is not None and value is not False:
                what = "attention sinks (s_aux)" if name == "s_aux" else repr(name)
                raise _Unsupported(f"{self._name} asks attention for {what}, which no backend has")

    def _check_mask(self, attention_mask: torch.Tensor | None, window: int | None) -> None:
        """Compare what the family's mask would hide with what a window alone hides."""
        if attention_mask is None:
            return
        mask = mask_of(attention_mask)
        if mask is None:
            raise _Unsupported(f"{self._name} has a mask of its own")
        if not _hides_as_window(mask, window):
            raise _Unsupported(
                f"the mask of {self._name} hides something else than the future and what lies "
                f"beyond sliding_window={window}"
            )

    def _check_shapes(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if key.shape[2] != query.shape[2]:
            raise _Unsupported(f"{self._name} attends to another sequence than its own")
        dims = [tensor.shape[-1] for tensor in (query, key, value)]
        if len(set(dims)) > 1 or key.shape[1] != value.shape[1]:
            raise _Unsupported(
                f"q, k and v of {self._name} have {dims[0]}, {dims[1]} and {dims[2]} elements a "
                f"head, k {key.shape[1]} heads and v {value.shape[1]}; they must agree"
            )
        if query.shape[1] % key.shape[1]:
            raise _Unsupported(
                f"the {query.shape[1]} q heads of {self._name} are no multiple of its "
                f"{key.shape[1]} KV heads"
            )
