"""What the engine asks of a model."""

from abc import abstractmethod
from typing import ClassVar

import torch

from minisgl.attention.batch import Batch
from minisgl.layers.base import Layer


class BaseLLMModel(Layer):
    """A decoder-only language model on one rank, built as ``Class(config, context)``.

    Its weights are declared by its layers; ``minisgl.models.loading`` fills them.
    """

    supports_cuda_graphs: ClassVar[bool] = True
    """Whether ``forward`` may be captured: fixed addresses, no synchronisation, no branch on data.

    ``False``: the engine runs every launch eagerly.
    """

    @abstractmethod
    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the logits of the sampled tokens, ``[S, vocab_size]``, on every rank.

        Runs under ``torch.inference_mode`` with ``batch.plan`` set.
        """
