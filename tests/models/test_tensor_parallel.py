"""Sharding: nothing is lost on the way to the ranks, and their logits are those of one."""

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from minisgl.errors import SettingsError
from minisgl.layers.base import shard_heads
from minisgl.models.loading import fill_dummy
from minisgl.models.opening import open_checkpoint
from minisgl.testing.communicators import run_ranks, thread_group
from support.forward import build_context, load_model, load_name, logits_of, records
from support.tiny_models import ARCHITECTURES, write_tiny_model

PROMPT = torch.randint(3, 263, (40,), generator=torch.Generator().manual_seed(2)).tolist()
HEADS = {1: (8, 2), 2: (8, 2), 3: (6, 3), 4: (8, 2), 5: (10, 1), 6: (12, 3), 7: (14, 7), 8: (8, 2)}


EXPERTS: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3": (Qwen3MoeConfig, {"num_experts": 3, "moe_intermediate_size": 11, "head_dim": 4}),
    "mixtral": (MixtralConfig, {"num_local_experts": 3, "intermediate_size": 11, "head_dim": 4}),
    "qwen2": (
        Qwen2MoeConfig,
        {
            "num_experts": 3,
            "moe_intermediate_size": 11,
            "shared_expert_intermediate_size": 13,
            "head_dim": 4,
        },
    ),
    "olmoe": (OlmoeConfig, {"num_experts": 3, "intermediate_size": 11, "attention_bias": True}),
}


def build_ranks(size, config_class, **values):
    q_heads, kv_heads = HEADS[size]
    common = {"intermediate_size": 37, "num_experts_per_tok": 2, "eos_token_id": 2}
    config = config_class(
        vocab_size=263,
        hidden_size=4 * q_heads,
        num_hidden_layers=2,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        **{**common, **values},
    )
    architecture = config_class.__name__.replace("Config", "ForCausalLM")
    config.architectures = [architecture]
    record = records()[architecture]
    model_config = load_name(record.config_reader)(config)
    return [
        load_name(record.model)(
            model_config, build_context(model_config, communicator=communicator)
        )
        for communicator in thread_group(size)
    ]


def random_checkpoint(models):
    generator = torch.Generator().manual_seed(0)
    pieces = {p.name: p for model in models for w in model.weights() for p in w.pieces}
    return {name: torch.rand(piece.shape, generator=generator) for name, piece in pieces.items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize(
    ("kind", "stacked"),
    [("dense", False), *((kind, stacked) for kind in EXPERTS for stacked in (False, True))],
)
def test_shards_gather_to_the_checkpoint(kind, size, tied, stacked):
    if kind == "dense":
        values: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "head_dim": 3}
        models = build_ranks(size, LlamaConfig, tie_word_embeddings=tied, **values)
    else:
        config_class, values = EXPERTS[kind]
        models = build_ranks(size, config_class, tie_word_embeddings=tied, **values)
        if stacked:
            names = {f"model.layers.{i}.mlp.experts.gate_up_proj" for i in range(2)}
            for model in models:
                for layer in model.layers():
                    layer.prepare_loading(frozenset(names))
    checkpoint = random_checkpoint(models)
    assert any(name.endswith("experts.gate_up_proj") for name in checkpoint) is stacked
    assert ("lm_head.weight" in checkpoint) is not tied
    gathered = {name: torch.full_like(tensor, -1) for name, tensor in checkpoint.items()}
    for model in models:
        for weight in model.weights():
            filled = torch.zeros_like(weight.tensor)
            for piece in weight.pieces:
                source = checkpoint[piece.name][piece.source]
                assert weight.tensor[piece.target].shape == source.shape
                assert not filled[piece.target].any(), f"{piece.name} overlaps another piece"
                filled[piece.target] = 1
                weight.tensor[piece.target] = source
                gathered[piece.name][piece.source] = weight.tensor[piece.target]
            assert not weight.tensor[filled == 0].any(), "padding is not zero"
    for name, tensor in checkpoint.items():
        assert torch.equal(gathered[name], tensor), name


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ranks_agree_with_one(architecture, size, tmp_path):
    overrides: dict[str, Any] = {"attention_bias": True}
    if architecture.startswith(("Qwen2", "Mi")):  # theirs are fixed
        overrides = {}
    folder = write_tiny_model(tmp_path, architecture, **overrides)
    expected = logits_of(*load_model(folder), PROMPT)

    def work(communicator):
        return logits_of(*load_model(folder, communicator=communicator), PROMPT)

    for logits in run_ranks(size, work):
        assert logits.shape == expected.shape
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=5e-5)


def test_biases_of_row_layers_are_added_once(tmp_path):
    folder = write_tiny_model(
        tmp_path, "LlamaForCausalLM", attention_bias=True, mlp_bias=True, intermediate_size=97
    )
    expected = logits_of(*load_model(folder), PROMPT)
    ranks = run_ranks(
        2, lambda communicator: logits_of(*load_model(folder, communicator=communicator), PROMPT)
    )
    torch.testing.assert_close(ranks[0], expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("kind", ["dense", *EXPERTS])
def test_dummy_weights_are_those_of_one_rank_in_shards(kind):
    dense = (LlamaConfig, {"attention_bias": True, "head_dim": 4})
    config_class, values = EXPERTS.get(kind, dense)
    gathered: dict[int, dict[str, torch.Tensor]] = {1: {}, 2: {}, 4: {}, 8: {}}
    for size, tensors in gathered.items():
        for model in build_ranks(size, config_class, **values):
            fill_dummy(model, 5)
            for weight in model.weights():
                for piece in weight.pieces:
                    whole = tensors.setdefault(piece.name, torch.full(piece.shape, -1.0))
                    whole[piece.source] = weight.tensor[piece.target]
    one = gathered[1]
    assert torch.unique(one["model.embed_tokens.weight"]).numel() > 3000
    for size in (2, 4, 8):
        assert all(torch.equal(tensor, one[name]) for name, tensor in gathered[size].items())


def test_heads_that_ranks_cannot_share_are_refused():
    with pytest.raises(SettingsError, match=r"tensor_parallel_size=3.*use one of \[1, 2, 4, 8\]"):
        shard_heads(8, 2, 0, 3)


def test_more_ranks_than_kv_heads_replicate_them():
    owners = [list(shard_heads(8, 2, rank, 8)[1]) for rank in range(8)]
    assert owners == [[0], [0], [0], [0], [1], [1], [1], [1]]


def test_a_failing_rank_names_its_own_error(tmp_path):
    def work(communicator):
        if communicator.rank == 1:
            raise ValueError("rank 1 is broken")
        return communicator.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="rank 1 is broken"):
        run_ranks(2, work)


def test_dummy_needs_no_weights(tmp_path):
    folder = write_tiny_model(tmp_path, "LlamaForCausalLM")
    (folder / "model.safetensors").unlink()
    assert open_checkpoint(folder, "dummy").num_tensors == 0
