"""What the constructors of layers and models are given."""

from dataclasses import dataclass

import torch

from minisgl.attention.interface import AttentionBackend
from minisgl.distributed.communicator import Communicator
from minisgl.kernel.ops import OpTable
from minisgl.kvcache.interface import KVCachePool
from minisgl.moe.exchange import ExpertExchange
from minisgl.moe.interface import MoeBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """The surroundings of a model on one rank: no layer reaches for a global instead.

    Attributes:
        device, dtype: of weights and activations.
        communicator: the tensor-parallel group.
        ops: the table of small fused operations.
        attention: the attention backend.
        moe: the MoE backend; ``None`` for dense models.
        expert_parallel_size: groups of ranks that experts are spread over, see ``ExpertPlacement``.
        moe_weights_dtype: of experts, if they are quantized (``MoeContext.weights_dtype``).
        exchange: of tokens and results between those groups; ``None`` if there is only one.
        kv_pool: where attention layers store K and V.
        max_seq_len: most tokens of one sequence: the length of position tables.
    """

    device: torch.device
    dtype: torch.dtype
    communicator: Communicator
    ops: OpTable
    attention: AttentionBackend
    moe: MoeBackend | None
    kv_pool: KVCachePool
    max_seq_len: int
    expert_parallel_size: int = 1
    exchange: ExpertExchange | None = None
    moe_weights_dtype: torch.dtype | None = None
