"""Experts in fp8: quantized as they load, the same for any number of ranks, and as defined."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from minisgl.distributed.communicator import Communicator
from minisgl.layers import base
from minisgl.layers.context import BuildContext
from minisgl.layers.moe import MoeLayer
from minisgl.models.interface import BaseLLMModel
from minisgl.models.loading import fill_dummy
from minisgl.moe import dequantize_rows, quantize_rows
from minisgl.moe.collective_exchanges import AllReduceExchange, AllToAllExchange
from minisgl.moe.fp8 import FP8
from minisgl.testing.communicators import run_ranks
from support.forward import generate, load_model, logits_of
from support.tiny_models import write_tiny_model

PROMPT = torch.randint(3, 263, (41,), generator=torch.Generator().manual_seed(7)).tolist()
ARCHITECTURES = (
    "MixtralForCausalLM", "OlmoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM",
)  # fmt: skip
FP8_ACTIVATIONS = 0.15
"""Error of logits, in norm, for tokens that are quantized before both products of every layer."""


class QuantizedTokens(TorchFunctionMode):
    """What the given stacks of experts are multiplied with is quantized before, and undone."""

    def __init__(self, stacks: list[torch.Tensor]) -> None:
        super().__init__()
        self._stacks = {stack.untyped_storage().data_ptr() for stack in stacks}
        self.num_products = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and args[1].untyped_storage().data_ptr() in self._stacks:
            args = (dequantize_rows(*quantize_rows(args[0])), *args[1:])
            self.num_products += 1
        return func(*args, **(kwargs or {}))


def load_fp8(path: Path, **options: Any) -> tuple[BaseLLMModel, BuildContext]:
    return load_model(path, moe_weights_dtype=FP8, **options)


def moe_layers(model: BaseLLMModel) -> list[MoeLayer]:
    return [layer for layer in model.layers() if isinstance(layer, MoeLayer)]


def stacks(layer: MoeLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up, and down, as their scales give them back."""
    scales = layer._scales["scales"]
    return dequantize_rows(layer.gate_up, scales.gate_up), dequantize_rows(layer.down, scales.down)


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_transformers_with_the_same_weights(architecture, tmp_path):
    """With dequantized weights in transformers' model: what is left is the tokens' quantization."""
    folder = write_tiny_model(tmp_path, architecture)
    model, context = load_fp8(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    reference.set_experts_implementation("eager")
    ours = iter(moe_layers(model))
    replaced: list[torch.Tensor] = []
    for layer in reference.model.layers:
        if hasattr(layer.mlp, "experts"):
            gate_up, down = stacks(next(ours))
            experts = layer.mlp.experts
            for parameter, value in ((experts.gate_up_proj, gate_up), (experts.down_proj, down)):
                # Half of a step of three bits of mantissa, of the largest in the row.
                bound = parameter.detach().abs().amax(-1, keepdim=True) / 16
                assert ((parameter - value).abs() <= bound).all()
                parameter.data.copy_(value)
                replaced.append(parameter)
    assert len(replaced) == 2 * len(moe_layers(model))
    logits = logits_of(model, context, PROMPT)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
        with QuantizedTokens(replaced) as tokens:
            nearer = reference(torch.tensor([PROMPT])).logits[0]
    assert tokens.num_products >= len(replaced)
    assert apart(logits, nearer) < 1e-3
    # Some tokens go to another expert, where two are about as likely, and end far off.
    each = (logits - expected).norm(dim=1) / expected.norm(dim=1)
    assert 1e-3 < each.median() < FP8_ACTIVATIONS


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_either_form_of_a_checkpoint_is_quantized_expert_by_expert(
    architecture, tmp_path, monkeypatch
):
    """Catches: a scale for a whole stack, and a whole stack in float32 beside the quantized one."""
    published = write_tiny_model(tmp_path / "published", architecture)
    stacked = tmp_path / "stacked"
    original = AutoModelForCausalLM.from_pretrained(published)
    original.save_pretrained(stacked, save_original_format=False)
    largest = 0

    def noted(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal largest
        largest = max(largest, rows.numel())
        return quantize_rows(rows)

    monkeypatch.setattr(base, "quantize_rows", noted)
    weights = [
        layer.mlp.experts for layer in original.model.layers if hasattr(layer.mlp, "experts")
    ]
    for folder in (published, stacked):
        model, _ = load_fp8(folder)
        assert largest <= weights[0].gate_up_proj[0].numel()
        for layer, right in zip(moe_layers(model), weights, strict=True):
            scales = layer._scales["scales"]
            for values, scale, whole in (
                (layer.gate_up, scales.gate_up, right.gate_up_proj),
                (layer.down, scales.down, right.down_proj),
            ):
                expected, of_expected = quantize_rows(whole.detach())
                assert values.dtype == FP8
                assert torch.equal(values.float(), expected.float())
                assert torch.equal(scale, of_expected)


def test_they_take_a_byte_a_weight_and_a_scale_an_output_channel(tmp_path):
    model, _ = load_fp8(write_tiny_model(tmp_path, "OlmoeForCausalLM"))
    layer = moe_layers(model)[0]
    gate_up, down = (layer._weights[name] for name in ("gate_up", "down"))
    assert gate_up.nbytes == 6 * 2 * 48 * (64 + 4)
    assert down.nbytes == 6 * 64 * (48 + 4)


@pytest.mark.parametrize("dummy", [False, True])
@pytest.mark.parametrize(("size", "ep"), [(2, 1), (2, 2), (4, 2)])
def test_ranks_hold_the_weights_of_one(size, ep, dummy, tmp_path):
    """Catches: scales of a rank's part of a row, and of an expert that another rank holds."""
    folder = write_tiny_model(
        tmp_path, "Qwen3MoeForCausalLM", num_experts=4, moe_intermediate_size=33, mlp_only_layers=[]
    )

    def fill(model: BaseLLMModel) -> list[MoeLayer]:
        if dummy:
            fill_dummy(model, 5)
        return moe_layers(model)

    whole = fill(load_fp8(folder)[0])
    ranks = run_ranks(
        size, lambda communicator: fill(load_fp8(folder, communicator=communicator, ep=ep)[0])
    )
    shared_by, held = size // ep, 4 // ep
    for rank, layers in enumerate(ranks):
        group, part = divmod(rank, shared_by)
        experts = slice(group * held, (group + 1) * held)
        local = -(-33 // shared_by)
        taken = slice(part * local, min((part + 1) * local, 33))
        width = taken.stop - taken.start
        for layer, original in zip(layers, whole, strict=True):
            gate_up, down = stacks(layer)
            of_gate_up, of_down = stacks(original)
            assert torch.equal(down[..., :width], of_down[experts, :, taken])
            assert not down[..., width:].any()
            gates, ups = of_gate_up.chunk(2, dim=1)
            assert torch.equal(gate_up[:, :width], gates[experts, taken])
            assert torch.equal(gate_up[:, local : local + width], ups[experts, taken])
            assert not gate_up[:, width:local].any()


@pytest.mark.parametrize(
    ("size", "ep", "exchange"),
    [(2, 1, None), (2, 2, AllReduceExchange), (2, 2, AllToAllExchange)],
)
def test_ranks_compute_what_one_does(size, ep, exchange, tmp_path):
    """Not quite where they share experts: then an inner row is quantized in parts."""
    folder = write_tiny_model(tmp_path, "Qwen3MoeForCausalLM")
    expected = logits_of(*load_fp8(folder), PROMPT)

    def work(communicator: Communicator) -> torch.Tensor:
        model, context = load_fp8(folder, communicator=communicator, ep=ep, exchange=exchange)
        return logits_of(model, context, PROMPT)

    for logits in run_ranks(size, work):
        assert apart(logits, expected) < (FP8_ACTIVATIONS if ep == 1 else 1e-2)


def test_decoding_continues_what_prefill_begins(tmp_path):
    model, context = load_fp8(write_tiny_model(tmp_path, "Qwen3MoeForCausalLM"))
    (tokens,) = generate(model, context, [PROMPT], 8)
    for place in range(1, 8):
        logits = logits_of(model, context, [*PROMPT, *tokens[:place]])[-1]
        assert logits[tokens[place]] > logits.max() - 0.05 * (logits.max() - logits.mean())


def test_rows_are_quantized_to_the_nearest_and_undone():
    rows = torch.tensor(
        [[448.0, 17.0, 0.0015, -448.0], [0.0, 0.0, 0.0, 0.0], [1e-3, -2e-3, 0, 1e-6]]
    )
    values, scale = quantize_rows(rows)
    assert values[0].tolist() == [448.0, 16.0, 0.001953125, -448.0]
    assert scale[0] == 1
    assert not values[1].float().any()
    assert scale[1] > 0
    assert torch.allclose(dequantize_rows(values, scale), rows, rtol=1 / 16, atol=1e-3)
