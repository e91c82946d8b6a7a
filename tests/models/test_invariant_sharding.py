"""Invariant 20 (DESIGN section 7): sharding then gathering reproduces the checkpoint."""

from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from minisgl.layers.base import shard_heads
from minisgl.models.interface import BaseLLMModel
from minisgl.testing.communicators import thread_group
from support.forward import build_context, load_name, records

Tensors = dict[str, torch.Tensor]
Shape = tuple[int, int, type, dict[str, Any]]
"""Ranks, groups of them that experts are spread over, and a configuration."""


def values(q_heads: int, kv_heads: int, **changes: Any) -> dict[str, Any]:
    """Return a configuration of the smallest sizes, but for ``changes``."""
    return {
        "vocab_size": 3,
        "hidden_size": q_heads,
        "num_hidden_layers": 1,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 4,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
        "intermediate_size": 1,
        **changes,
    }


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """What ranks can share; no size but the number of experts need be a multiple of anything."""
    size = draw(st.integers(1, 8))
    # Each rank has whole KV heads, or several ranks share one.
    kv_heads = size * draw(st.integers(1, 2)) if draw(st.booleans()) else draw(divisors(size))
    q_heads = max(size, kv_heads) * draw(st.integers(1, 2))
    dense = draw(st.booleans())
    found = values(
        q_heads,
        kv_heads,
        vocab_size=draw(st.integers(3, 70)),
        hidden_size=q_heads * draw(st.integers(1, 2)),
        tie_word_embeddings=draw(st.booleans()),
        intermediate_size=draw(st.integers(1, 40)),
    )
    if dense:
        found |= {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}
        return size, 1, LlamaConfig, found
    ep = draw(divisors(size))
    experts, inner = ep * draw(st.integers(1, 3)), draw(st.integers(1, 20))
    found |= {"num_experts_per_tok": 1, "eos_token_id": 2, "pad_token_id": 0}
    kind = draw(st.sampled_from((Qwen3MoeConfig, MixtralConfig, Qwen2MoeConfig, OlmoeConfig)))
    if kind is OlmoeConfig:  # whose heads are as wide together as a hidden state
        del found["head_dim"]
        found |= {"hidden_size": 4 * q_heads}
    if kind in {OlmoeConfig, MixtralConfig}:
        found |= {"intermediate_size": inner}
    else:
        found |= {"moe_intermediate_size": inner}
    found |= {"num_local_experts" if kind is MixtralConfig else "num_experts": experts}
    if kind is Qwen2MoeConfig:
        found |= {"shared_expert_intermediate_size": draw(st.integers(1, 20))}
    return size, ep, kind, found


def divisors(size: int) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in range(1, size + 1) if size % n == 0])


def build_ranks(
    size: int, ep: int, config_class: type, values: dict[str, Any]
) -> list[BaseLLMModel]:
    config = config_class(**values)
    architecture = config_class.__name__.replace("Config", "ForCausalLM")
    config.architectures = [architecture]
    record = records()[architecture]
    model_config = load_name(record.config_reader)(config)
    return [
        load_name(record.model)(
            model_config,
            build_context(model_config, communicator=communicator, num_pages=1, ep=ep),
        )
        for communicator in thread_group(size)
    ]


def checkpoint_for(models: list[BaseLLMModel]) -> Tensors:
    """Distinct numbers in every tensor that the models ask for."""
    shapes = {p.name: p.shape for model in models for w in model.weights() for p in w.pieces}
    tensors: Tensors = {}
    first = 1
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        tensors[name] = torch.arange(first, first + count, dtype=torch.float32).view(shape)
        first += count
    return tensors


def shard_and_gather(models: list[BaseLLMModel], checkpoint: Tensors) -> Tensors:
    """Fill every weight of every rank, and copy each piece back from there."""
    gathered = {name: torch.zeros_like(tensor) for name, tensor in checkpoint.items()}
    for model in models:
        for weight in model.weights():
            times_filled = torch.zeros_like(weight.tensor)
            for piece in weight.pieces:
                source = checkpoint[piece.name][piece.source]
                assert weight.tensor[piece.target].shape == source.shape
                times_filled[piece.target] += 1
                weight.tensor[piece.target] = source
                gathered[piece.name][piece.source] = weight.tensor[piece.target]
            assert times_filled.max() <= 1, "two pieces fill one place"
            assert not weight.tensor[times_filled == 0].any(), "padding is not zero"
    return gathered


@example((2, 1, LlamaConfig, values(2, 1, vocab_size=3)))
@example((4, 2, MixtralConfig, values(4, 1, num_local_experts=2, intermediate_size=3)))
@given(shapes())
def test_invariant_20_shards_of_1_to_8_ranks_gather_to_the_checkpoint(
    shape: Shape,
) -> None:
    """Replicated KV heads, odd vocabularies, biases, tied heads, experts, sizes that do not divide.

    Catches: KV heads replicated to the wrong ranks, vocabulary rows lost between two ranks or
    padding that is not zero, q, k and v in each other's place, a tied head with a weight too many.
    """
    models = build_ranks(*shape)
    checkpoint = checkpoint_for(models)
    assert ("lm_head.weight" in checkpoint) is not shape[3]["tie_word_embeddings"]
    gathered = shard_and_gather(models, checkpoint)
    for name, tensor in checkpoint.items():
        assert torch.equal(gathered[name], tensor), name


@st.composite
def ranks_and_heads(draw: st.DrawFn) -> tuple[int, int]:
    """Ranks, and KV heads that they share: whole ones each, or one for several of them."""
    size = draw(st.integers(1, 8))
    return size, draw(divisors(size) | st.integers(1, 3).map(lambda each: size * each))


@example(ranks_and_kv=(4, 2), group=1)
@given(ranks_and_kv=ranks_and_heads(), group=st.integers(1, 4))
def test_invariant_20_every_query_head_finds_its_kv_head_on_its_rank(
    ranks_and_kv: tuple[int, int], group: int
) -> None:
    """All query heads once, and each next to the KV head that it had on one rank.

    Catches: KV heads replicated in turn instead of in blocks, which loses no weight and computes
    another model.
    """
    size, num_kv = ranks_and_kv
    num_q = max(size, num_kv) * group
    seen = []
    for rank in range(size):
        q_heads, kv_heads = shard_heads(num_q, num_kv, rank, size)
        for place, q_head in enumerate(q_heads):
            local = place // (len(q_heads) // len(kv_heads))
            assert kv_heads[local] == q_head // (num_q // num_kv)
            seen.append(q_head)
    assert seen == list(range(num_q))
