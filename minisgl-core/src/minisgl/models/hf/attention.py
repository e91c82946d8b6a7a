"""The function that transformers' attention modules call in place of their own attention.

transformers keeps one process-wide table of such functions. Ours has no state: each module carries
what answers for it, so that any number of models, in any number of engines, share the one entry.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from minisgl.attention.batch import Batch
from minisgl.attention.interface import AttentionLayerSpec
from minisgl.layers.context import BuildContext

NAME = "minisgl"
"""Our entry of transformers' table. It has none in the table of masks: then none is built."""

SURVEY_NAME = "minisgl_survey"
"""The same, with masks that say what they would hide."""

Answer = Callable[..., torch.Tensor]
"""Called with the module, q, k, v, the mask and the other arguments; q ``[1, heads, T, dim]``.

Returns the output ``[1, T, heads, dim]``.
"""

_ANSWER = "minisgl_attention"


Mask = Callable[..., torch.Tensor]
"""Called with batch, head, query and key positions: whether the query sees the key."""

_MASK = "minisgl_mask"


def register() -> None:
    """Make both names known to transformers; doing it again changes nothing."""
    AttentionInterface.register(NAME, _attend)
    AttentionInterface.register(SURVEY_NAME, _attend)
    AttentionMaskInterface.register(SURVEY_NAME, _describe_mask)


def mask_of(tensor: torch.Tensor | None) -> Mask | None:
    """Return what a mask would hide, if it is one that transformers made for ``SURVEY_NAME``."""
    return getattr(tensor, _MASK, None)


def answer_with(module: nn.Module, answer: Answer) -> None:
    """Let ``answer`` compute the attention of one module."""
    setattr(module, _ANSWER, answer)


def _attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Return the output and, as transformers wants, the weights, which nobody has."""
    answer: Answer = getattr(module, _ANSWER)
    return answer(module, *args, **kwargs), None


def _describe_mask(*, mask_function: Mask, **_: Any) -> torch.Tensor:
    """Stand in for a mask: an empty tensor that carries the function which would fill it."""
    tensor = torch.empty(1, 1, 1, 1, device="meta")
    setattr(tensor, _MASK, mask_function)
    return tensor


class LaunchInFlight:
    """The batch that a model runs at the moment: its attention modules look here."""

    def __init__(self) -> None:
        self.batch: Batch | None = None


class PagedAttention:
    """Answers for one attention module: stores K and V in the pool and attends over pages."""

    def __init__(
        self, spec: AttentionLayerSpec, launch: LaunchInFlight, context: BuildContext
    ) -> None:
        self._spec = spec
        self._launch = launch
        self._backend = context.attention
        self._pool = context.kv_pool
        self._dtype = context.dtype

    def __call__(
        self,
        module: nn.Module,  # noqa: ARG002
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """See ``Answer``. The other arguments are the same each time: ``survey`` has seen them."""
        batch = self._launch.batch
        assert batch is not None, "a model runs through its forward only"
        q, k, v = (self._by_token(heads) for heads in (query, key, value))
        if self._backend.store_fusion:
            out = self._backend.attend(q, self._spec, batch.plan, (k, v))
        else:
            self._pool.store(k, v, batch.slots, self._spec.index)
            out = self._backend.attend(q, self._spec, batch.plan)
        return out.unsqueeze(0).to(query.dtype)

    def _by_token(self, heads: torch.Tensor) -> torch.Tensor:
        """``[1, heads, T, dim]`` to a contiguous ``[T, heads, dim]`` in the engine's dtype."""
        return heads.squeeze(0).transpose(0, 1).to(self._dtype).contiguous()
