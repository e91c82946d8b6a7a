"""What every part of the engine is built from."""

from dataclasses import dataclass

import torch

from minisgl.models.checkpoint import Checkpoint
from minisgl.models.config import ModelFacts
from minisgl.plugins.host import PluginHost
from minisgl.plugins.model_selection import ModelSelection
from minisgl.plugins.records import BackendQuery
from minisgl.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What is decided before anything is built."""

    settings: Settings
    host: PluginHost
    checkpoint: Checkpoint
    model: ModelSelection
    config: ModelFacts
    device: torch.device
    dtype: torch.dtype
    max_seq_len: int
    num_ranks: int
    query: BackendQuery

    @property
    def moe_weights_dtype(self) -> torch.dtype | None:
        """Of quantized experts; see ``MoeContext.weights_dtype``."""
        name = self.query.moe_weights_dtype
        return None if name is None else getattr(torch, name)
