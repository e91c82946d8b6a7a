"""Experts spread over ranks: each holds its own alone, and together they are one model."""

from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from minisgl.errors import ModelLoadError
from minisgl.layers.moe import MoeLayer
from minisgl.models.loading import fill_dummy
from minisgl.moe.collective_exchanges import AllReduceExchange, AllToAllExchange
from minisgl.testing.communicators import run_ranks
from support.forward import generate, load_model, logits_of
from support.tiny_models import write_tiny_model

PROMPT = torch.randint(3, 263, (41,), generator=torch.Generator().manual_seed(2)).tolist()
EXPERTS = {
    "Qwen3MoeForCausalLM": {"num_experts": 8, "moe_intermediate_size": 33},
    "MixtralForCausalLM": {"num_local_experts": 8, "intermediate_size": 35},
    "Qwen2MoeForCausalLM": {
        "num_experts": 8,
        "moe_intermediate_size": 33,
        "shared_expert_intermediate_size": 57,
    },
    "OlmoeForCausalLM": {"num_experts": 8, "intermediate_size": 37},
}
LAYOUTS = [(2, 2), (4, 4), (4, 2), (8, 8), (8, 2)]
"""Ranks, and groups of them that the experts are spread over."""
EXCHANGES = {"all-reduce": AllReduceExchange, "all-to-all": AllToAllExchange}


def write_model(folder, architecture):
    return write_tiny_model(folder, architecture, **EXPERTS[architecture])


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("size", "ep"), LAYOUTS)
@pytest.mark.parametrize("architecture", EXPERTS)
def test_ranks_with_different_experts_agree_with_one(architecture, size, ep, exchange, tmp_path):
    """Catches: experts on the wrong rank, results added to another token, sums left partial."""
    folder = write_model(tmp_path, architecture)
    expected = logits_of(*load_model(folder), PROMPT)
    # Prompts of fewer tokens than ranks leave some ranks without any.
    prompts = [PROMPT[:30], PROMPT[7:12], PROMPT[20:21]]
    texts = generate(*load_model(folder), prompts, 8)

    def work(communicator):
        options = {"ep": ep, "exchange": EXCHANGES[exchange]}
        model, context = load_model(folder, communicator=communicator, **options)
        return logits_of(model, context, PROMPT), generate(model, context, prompts, 8)

    ranks = run_ranks(size, work)
    for logits, tokens in ranks:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=5e-5)
        assert tokens == texts
    assert all(torch.equal(first, second) for (first, _), (second, _) in pairwise(ranks))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("size", "ep"), LAYOUTS)
@pytest.mark.parametrize("architecture", EXPERTS)
def test_each_rank_holds_its_own_experts_alone(architecture, size, ep, stacked, tmp_path):
    folder = write_model(tmp_path, architecture)
    whole = [layer for layer in load_model(folder)[0].layers() if isinstance(layer, MoeLayer)]
    if stacked:
        model = AutoModelForCausalLM.from_pretrained(folder)
        folder = tmp_path / "stacked"
        model.save_pretrained(folder, save_original_format=False)

    def work(communicator):
        model, _ = load_model(folder, communicator=communicator, ep=ep)
        return [layer for layer in model.layers() if isinstance(layer, MoeLayer)]

    shared_by, held = size // ep, 8 // ep
    for rank, layers in enumerate(run_ranks(size, work)):
        group, part = divmod(rank, shared_by)
        for layer, original in zip(layers, whole, strict=True):
            experts = slice(group * held, (group + 1) * held)
            inner = original.down.shape[2]
            local = -(-inner // shared_by)
            taken = slice(part * local, min((part + 1) * local, inner))
            width = taken.stop - taken.start
            assert layer.down.shape == (held, 64, local)
            assert torch.equal(layer.down[..., :width], original.down[experts, :, taken])
            gates, ups = original.gate_up.chunk(2, dim=1)
            assert torch.equal(layer.gate_up[:, :width], gates[experts, taken])
            assert torch.equal(layer.gate_up[:, local : local + width], ups[experts, taken])


@pytest.mark.parametrize("expert", [0, 7])
def test_an_expert_that_is_missing_is_missed_by_every_rank(expert, tmp_path):
    """Not by its own alone: the others would wait for it."""
    folder = write_model(tmp_path, "OlmoeForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
    extra = "model.layers.1.mlp.experts.8.down_proj.weight"
    tensors[extra] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")

    def work(communicator):
        with pytest.raises(ModelLoadError) as caught:
            load_model(folder, communicator=communicator, ep=2)
        return str(caught.value)

    for message in run_ranks(2, work):
        assert f"missing: 1 tensors ({name})" in message
        assert f"unexpected: 1 tensors ({extra})" in message


def test_dummy_weights_are_those_of_one_rank(tmp_path):
    folder = write_model(tmp_path, "MixtralForCausalLM")
    model, context = load_model(folder)
    fill_dummy(model, 3)
    expected = logits_of(model, context, PROMPT)

    def work(communicator):
        options = {"ep": 2, "exchange": AllReduceExchange}
        model, context = load_model(folder, communicator=communicator, **options)
        fill_dummy(model, 3)
        return logits_of(model, context, PROMPT)

    for logits in run_ranks(4, work):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=5e-5)
