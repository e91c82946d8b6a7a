"""A model whose forward pass is transformers' own, over our pool and attention backend."""

import logging
import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from minisgl.attention.batch import Batch
from minisgl.layers.base import Dummy, allocate
from minisgl.layers.context import BuildContext
from minisgl.models.hf.attention import LaunchInFlight, PagedAttention, answer_with
from minisgl.models.hf.build import build
from minisgl.models.hf.config import TransformersConfig
from minisgl.models.hf.names import pieces_for, whole
from minisgl.models.interface import BaseLLMModel

logger = logging.getLogger(__name__)


class TransformersModel(BaseLLMModel):
    """Any causal language model of transformers that ``read_config`` accepts; on one rank.

    Its parameters are declared one by one, under the names that transformers gives them.
    """

    supports_cuda_graphs = False

    def __init__(self, config: TransformersConfig, context: BuildContext) -> None:
        super().__init__()
        assert context.communicator.size == 1, "survey refuses several ranks"
        self._context = context
        self._model = build(config.hf_config, context.dtype, context.device)
        self._launch = LaunchInFlight()
        for name, spec in config.attention:
            module = self._model.get_submodule(name)
            answer_with(module, PagedAttention(spec, self._launch, context))
        state = self._model.state_dict(keep_vars=True)
        self._ties = _ties(state)
        for name, tensor in state.items():
            if name not in self._ties:
                self._declare_tensor(name, tensor)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the logits of the sampled tokens, ``[S, vocab_size]``."""
        self._launch.batch = batch
        try:
            output = self._model(
                input_ids=batch.input_ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=0 if batch.sample_indices is None else batch.sample_indices,
            )
        finally:
            self._launch.batch = None
        logits: torch.Tensor = output.logits
        return logits.squeeze(0)

    def prepare_loading(self, names: frozenset[str]) -> None:
        """Find what fills each parameter; a tied one that the checkpoint holds becomes its own."""
        state = self._model.state_dict(keep_vars=True)
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        places = pieces_for(self._model, names, shapes)
        for tied, source in self._ties.items():
            if tied in places and source in places:
                own = nn.Parameter(torch.empty_like(state[tied]), requires_grad=False)
                _set_parameter(self._model, tied, own)
                self._declare_tensor(tied, own)
            elif tied in places:
                places[source] = places.pop(tied)
        for name, pieces in places.items():
            self._weights[name] = replace(self._weights[name], pieces=tuple(pieces))

    def finish_loading(self) -> None:
        """Tie again what turned out to be equal."""
        for tied, source in self._ties.items():
            if tied not in self._weights:
                continue
            if torch.equal(self._weights[tied].tensor, self._weights[source].tensor):
                del self._weights[tied]
                _set_parameter(self._model, tied, self._model.get_parameter(source))
            else:
                logger.warning(
                    "%s and %s are one by the configuration, but differ in the checkpoint: not "
                    "tied",
                    tied,
                    source,
                )

    def ignores(self, name: str) -> bool:
        """Whether transformers, too, leaves a tensor of this name in the checkpoint unread."""
        patterns = getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ()
        return any(re.search(pattern, name) for pattern in patterns)

    def _declare_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Declare a parameter or a saved buffer of the model, filled whole by its own name."""
        module = self._model.get_submodule(name.rpartition(".")[0])
        if isinstance(tensor, nn.Parameter):
            dtype = _parameter_dtype(self._model, name, tensor.dtype)
            multiplies = isinstance(module, nn.Linear) or name in self._ties.values()
            # Only the CPU has a layout of its own for the right side of products.
            matrix = multiplies and tensor.ndim == 2 and not tensor.is_cuda
            if matrix or dtype != tensor.dtype:
                tensor.data = allocate(tensor.shape, dtype, tensor.device, matrix=matrix)
        self.adopt(name, tensor.data, [whole(name, tensor.shape)], dummy=_dummy(name, tensor))


def _ties(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the names of tensors that are the same as an earlier one, and that one's name."""
    first: dict[int, str] = {}
    return {
        name: first[id(tensor)]
        for name, tensor in state.items()
        if first.setdefault(id(tensor), name) != name
    }


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, parameter)


def _parameter_dtype(model: PreTrainedModel, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return float32 for what a family keeps in it whatever the others are in."""
    kept = set(model._keep_in_fp32_modules_strict or ())  # noqa: SLF001  (transformers' own name)
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())  # noqa: SLF001
    keep = any(re.search(rf"(^|\.){part}(\.|$)", name) for part in kept)
    return torch.float32 if keep and dtype.is_floating_point else dtype


def _dummy(name: str, tensor: torch.Tensor) -> Dummy:
    if not isinstance(tensor, nn.Parameter) or name.endswith("bias"):
        return "zeros"
    return "ones" if tensor.ndim == 1 else "normal"
