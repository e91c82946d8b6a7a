"""Run a model directly, without engine and scheduler: prefill whole prompts, then decode."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl.attention.batch import Batch
from minisgl.attention.interface import AttentionContext
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.distributed.communicator import Communicator, SingleCommunicator
from minisgl.kernel.ops import OpTable
from minisgl.kvcache.interface import KVPoolSpec
from minisgl.kvcache.mha_pool import MHAKVCachePool
from minisgl.layers.base import shard_heads, shard_size
from minisgl.layers.context import BuildContext
from minisgl.models.config import ModelConfig, ModelFacts
from minisgl.models.hf import config as hf
from minisgl.models.hf.model import TransformersModel
from minisgl.models.interface import BaseLLMModel
from minisgl.models.loading import load_weights
from minisgl.models.opening import open_checkpoint
from minisgl.moe.exchange import ExchangeContext, ExpertExchange
from minisgl.moe.interface import MoeContext
from minisgl.moe.placement import ExpertPlacement
from minisgl.moe.torch_backend import TorchMoeBackend
from minisgl_models.plugin import minisgl_models

PAGE_SIZE = 4
CPU = torch.device("cpu")


def records() -> dict[str, Any]:
    """Architecture name to the record of the models plugin."""
    return {name: record for record in minisgl_models() for name in record.architectures}


def load_name(reference: str) -> Any:
    """Load ``module:name``."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def build_context(
    config: ModelFacts,
    *,
    communicator: Communicator | None = None,
    max_seq_len: int | None = None,
    num_pages: int = 64,
    dtype: torch.dtype = torch.float32,
    ep: int = 1,
    exchange: Callable[[ExchangeContext], ExpertExchange] | None = None,
    moe_weights_dtype: torch.dtype | None = None,
) -> BuildContext:
    """A CPU context with core's reference backends and an allocated pool."""
    communicator = communicator or SingleCommunicator()
    q_heads, kv_heads = shard_heads(
        config.num_q_heads, config.num_kv_heads, communicator.rank, communicator.size
    )
    max_seq_len = max_seq_len or config.max_position
    pool = MHAKVCachePool(
        KVPoolSpec(
            num_layers=config.num_layers,
            num_kv_heads=len(kv_heads),
            head_dim=config.head_dim,
            page_size=PAGE_SIZE,
            dtype=dtype,
            device=CPU,
        )
    )
    pool.allocate(num_pages)
    attention = TorchAttentionBackend(
        AttentionContext(
            device=CPU,
            dtype=dtype,
            num_q_heads=len(q_heads),
            num_kv_heads=len(kv_heads),
            head_dim=config.head_dim,
            num_layers=config.num_layers,
            page_size=PAGE_SIZE,
            kv_pool=pool,
            max_running_requests=8,
            max_seq_len=max_seq_len,
        )
    )
    moe = exchanged = None
    if isinstance(config, ModelConfig) and config.moe is not None:
        placement = ExpertPlacement(config.moe.num_experts, communicator.size, ep)
        common: dict[str, Any] = {
            "device": CPU,
            "dtype": dtype,
            "top_k": config.moe.top_k,
            "hidden_size": config.hidden_size,
            "max_num_tokens": 1024,
        }
        moe = TorchMoeBackend(
            MoeContext(
                num_experts=config.moe.num_experts,
                intermediate_size=shard_size(
                    config.moe.intermediate_size, placement.ranks_per_group
                ),
                activation=config.activation,
                held_experts=placement.experts_of(communicator.rank),
                weights_dtype=moe_weights_dtype,
                **common,
            )
        )
        if exchange is not None:
            exchanged = exchange(
                ExchangeContext(communicator=communicator, placement=placement, **common)
            )
    return BuildContext(
        device=CPU,
        dtype=dtype,
        communicator=communicator,
        ops=OpTable(),
        attention=attention,
        moe=moe,
        kv_pool=pool,
        max_seq_len=max_seq_len,
        expert_parallel_size=ep,
        exchange=exchanged,
        moe_weights_dtype=moe_weights_dtype,
    )


def read_config(path: Path) -> ModelConfig:
    """The ``ModelConfig`` of a checkpoint, through the plugin's record."""
    checkpoint = open_checkpoint(path, "auto")
    record = records()[checkpoint.architectures[0]]
    config: ModelConfig = load_name(record.config_reader)(checkpoint.hf_config)
    return config


def load_model(path: Path, **context_options: Any) -> tuple[BaseLLMModel, BuildContext]:
    """Build and load a model on one rank; returns it with its context."""
    checkpoint = open_checkpoint(path, "auto")
    record = records()[checkpoint.architectures[0]]
    config = load_name(record.config_reader)(checkpoint.hf_config)
    context = build_context(config, **context_options)
    model = load_name(record.model)(config, context)
    load_weights(model, checkpoint, progress=False)
    return model, context


def load_through_transformers(path: Path, **options: Any) -> tuple[TransformersModel, BuildContext]:
    """Build and load a model that transformers' code computes; returns it with its context."""
    checkpoint = open_checkpoint(path, "auto")
    config = hf.read_config(checkpoint.hf_config)
    context = build_context(config, **options)
    model = TransformersModel(config, context)
    load_weights(model, checkpoint, progress=False)
    return model, context


def make_batch(
    context: BuildContext, tokens: Sequence[Sequence[int]], starts: Sequence[int], *, decode: bool
) -> Batch:
    """A launch of one slice a row; row r has the pages ``1 + r * width`` onwards."""
    width = -(-context.max_seq_len // PAGE_SIZE)
    num_pages = context.kv_pool.num_pages
    width = min(width, (num_pages - 1) // len(tokens))
    table = (1 + np.arange(len(tokens) * width, dtype=np.int32)).reshape(len(tokens), width)
    positions, slots = [], []
    for row, (ids, start) in enumerate(zip(tokens, starts, strict=True)):
        for position in range(start, start + len(ids)):
            positions.append(position)
            slots.append(int(table[row, position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE)
    query_lens = np.array([len(ids) for ids in tokens], dtype=np.int32)
    kv_lens = query_lens + np.array(starts, dtype=np.int32)
    batch = Batch(
        input_ids=torch.tensor([token for ids in tokens for token in ids]),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        sample_indices=None,
        rows=torch.arange(len(tokens)),
        num_decode_rows=len(tokens) if decode else 0,
        query_lens=query_lens,
        kv_lens=kv_lens,
        kv_lens_device=torch.from_numpy(kv_lens),
        page_table=torch.from_numpy(table),
        page_size=PAGE_SIZE,
    )
    batch.plan = context.attention.plan(batch, 0)
    return batch


def logits_of(model: BaseLLMModel, context: BuildContext, prompt: Sequence[int]) -> torch.Tensor:
    """Logits ``[T, vocab]`` of a whole prompt, prefilled in one launch."""
    with torch.inference_mode():
        return model.forward(make_batch(context, [prompt], [0], decode=False))


def generate(
    model: BaseLLMModel, context: BuildContext, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """Greedy tokens of several prompts: one prefill launch, then decode launches of all rows."""
    with torch.inference_mode():
        batch = make_batch(context, prompts, [0] * len(prompts), decode=False)
        lengths = [len(prompt) for prompt in prompts]
        batch.sample_indices = torch.tensor(np.cumsum(lengths) - 1)
        outputs = [[token] for token in model.forward(batch).argmax(-1).tolist()]
        for _ in range(num_tokens - 1):
            batch = make_batch(context, [row[-1:] for row in outputs], lengths, decode=True)
            for row, token in zip(outputs, model.forward(batch).argmax(-1).tolist(), strict=True):
                row.append(token)
            lengths = [length + 1 for length in lengths]
    return outputs
