"""Models of transformers as layers: parameters declared and filled once, buffers, logits."""

import gc
import json
import logging
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from minisgl.errors import ModelLoadError
from minisgl.models.hf.build import _NoInitialization, build
from minisgl.models.hf.config import read_config
from minisgl.models.hf.model import TransformersModel
from minisgl.models.interface import BaseLLMModel
from minisgl.models.loading import fill_dummy, load_weights
from minisgl.models.opening import open_checkpoint
from support.forward import (
    build_context,
    load_model,
    load_through_transformers,
    logits_of,
    make_batch,
)
from support.tiny_models import (
    ARCHITECTURES,
    UNOFFERED_ARCHITECTURES,
    build_tiny_model,
    write_tiny_model,
)

PROMPT = [5, 100, 30, 7, 200, 18]


@pytest.fixture
def folder(tmp_path):
    return write_tiny_model(tmp_path / "model", "LlamaForCausalLM")


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")


def load_error(folder) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_through_transformers(folder)
    return str(caught.value)


def judge(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0]


def test_logits_are_those_of_transformers_and_of_the_plugin(folder):
    ours = logits_of(*load_through_transformers(folder), PROMPT)
    torch.testing.assert_close(ours, judge(folder), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours, logits_of(*load_model(folder), PROMPT), atol=1e-4, rtol=1e-4)


def test_the_head_runs_on_sampled_tokens_alone(folder):
    model, context = load_through_transformers(folder)
    everything = logits_of(model, context, PROMPT)
    rows = []
    model._model.lm_head.register_forward_hook(lambda _m, args, _o: rows.append(args[0].shape))
    with torch.inference_mode():
        batch = make_batch(context, [PROMPT, [9]], [0, 0], decode=False)
        batch.sample_indices = torch.tensor([5, 6])
        logits = model.forward(batch)
    assert rows == [(1, 2, 64)]
    torch.testing.assert_close(logits[0], everything[5], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*ARCHITECTURES, *UNOFFERED_ARCHITECTURES])
def test_buffers_are_those_of_a_model_that_was_built_as_usual(name):
    usual = build_tiny_model(name)
    model = build(usual.config, torch.float32, torch.device("cpu"))
    expected = dict(usual.named_buffers())
    assert {n for n, _ in model.named_buffers()} == expected.keys()
    for buffer, values in model.named_buffers():
        assert torch.equal(values, expected[buffer]), buffer


def test_parameters_are_not_initialised(monkeypatch):
    config = build_tiny_model("Gemma2ForCausalLM").config
    monkeypatch.setattr(torch, "empty", torch.zeros)  # what is not initialised shows as zero
    model = build(config, torch.float32, torch.device("cpu"))
    monkeypatch.undo()
    filled = [name for name, p in model.named_parameters() if p.ndim == 2 and p.any()]
    assert filled == []
    assert not any(p.requires_grad for p in model.parameters())


def test_only_parameters_are_left_alone():
    with _NoInitialization():
        buffer = torch.empty(3).fill_(2)
        parameter = torch.nn.Parameter(torch.zeros(3))
        torch.nn.init.ones_(parameter)
        parameter.data.add_(3)
    assert buffer.tolist() == [2, 2, 2]
    assert parameter.tolist() == [3, 3, 3]
    assert torch.nn.init.ones_(parameter).tolist() == [1, 1, 1]


def test_what_a_family_keeps_in_float32_stays_so(folder, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

    monkeypatch.setattr(LlamaPreTrainedModel, "_keep_in_fp32_modules_strict", ["norm"])
    model, _ = load_through_transformers(folder, dtype=torch.bfloat16)
    dtypes = {piece.name: w.tensor.dtype for w in model.weights() for piece in w.pieces}
    assert [name for name, dtype in dtypes.items() if dtype == torch.float32] == [
        "model.norm.weight"
    ]


def test_random_weights_are_finite_and_fixed_by_the_seed(folder):
    config = read_config(open_checkpoint(folder, "dummy").hf_config)
    logits = []
    for seed in (1, 1, 2):
        context = build_context(config)
        model = TransformersModel(config, context)
        fill_dummy(model, seed)
        logits.append(logits_of(model, context, PROMPT))
    assert torch.isfinite(logits[0]).all()
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


def test_missing_and_unexpected_names_are_listed(folder):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.1.mlp.side_proj.weight"] = torch.zeros(1)

    rewrite(folder, change)
    message = load_error(folder)
    assert "missing: 1 tensors (model.layers.1.mlp.up_proj.weight)" in message
    assert "unexpected: 1 tensors (model.layers.1.mlp.side_proj.weight)" in message


def test_a_wrong_shape_names_the_tensor(folder):
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.zeros(65)}))
    message = load_error(folder)
    assert "model.norm.weight" in message
    assert "has shape [65]" in message
    assert "asks for [64]" in message


def test_a_missing_expert_is_named(tmp_path):
    folder = write_tiny_model(tmp_path / "model", "Qwen3MoeForCausalLM")
    name = "model.layers.0.mlp.experts.{}.gate_proj.weight"
    rewrite(folder, lambda t: t.pop(name.format(2)))
    message = load_error(folder)
    assert "model.layers.0.mlp.experts.gate_up_proj stacks 6 tensors" in message
    assert f"has 5, the first of them {name.format(0)}" in message


def test_experts_are_stacked_in_the_order_of_their_numbers(tmp_path):
    folder = write_tiny_model(tmp_path / "model", "Qwen3MoeForCausalLM", num_experts=12)
    ours = logits_of(*load_through_transformers(folder), PROMPT)
    torch.testing.assert_close(ours, judge(folder), atol=1e-4, rtol=1e-4)


def test_conversions_that_are_not_followed_are_named(folder, monkeypatch):
    from transformers.core_model_loading import Transpose, WeightConverter

    from minisgl.models.hf import names

    rule = WeightConverter("old.weight", "model.norm.weight", operations=[Transpose()])
    monkeypatch.setattr(names, "get_model_conversion_mapping", lambda _model: [rule])
    rewrite(folder, lambda t: t.update({"old.weight": t.pop("model.norm.weight")}))
    message = load_error(folder)
    assert "model.norm.weight is made of old.weight by Transpose" in message
    assert "save_pretrained" in message


def test_names_without_the_prefix_of_the_base_model(folder):
    expected = logits_of(*load_through_transformers(folder), PROMPT)
    rewrite(
        folder,
        lambda t: [t.update({n.removeprefix("model."): t.pop(n)}) for n in list(t)],
    )
    assert torch.equal(logits_of(*load_through_transformers(folder), PROMPT), expected)


def test_a_parameter_under_two_names_is_refused(folder):
    rewrite(folder, lambda t: t.update({"norm.weight": t["model.norm.weight"].clone()}))
    message = load_error(folder)
    assert "model.norm.weight and norm.weight are all names of model.norm.weight" in message


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "GPT2LMHeadModel"])
def test_biases_and_matrices_of_any_layout(tmp_path, name):
    folder = write_tiny_model(tmp_path / "model", name)
    ours = logits_of(*load_through_transformers(folder), PROMPT)
    torch.testing.assert_close(ours, judge(folder), atol=1e-4, rtol=1e-4)


def test_what_transformers_ignores_is_ignored(tmp_path):
    folder = write_tiny_model(tmp_path / "model", "GPT2LMHeadModel")
    expected = logits_of(*load_through_transformers(folder), PROMPT)
    rewrite(folder, lambda t: t.update({"transformer.h.0.attn.bias": torch.zeros(1)}))
    assert torch.equal(logits_of(*load_through_transformers(folder), PROMPT), expected)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def tied(tmp_path):
    return write_tiny_model(tmp_path / "tied", "Qwen3ForCausalLM")


def test_tied_weights_are_one(tied):
    model, context = load_through_transformers(tied)
    assert model._model.lm_head.weight is model._model.model.embed_tokens.weight
    assert HEAD not in model._weights
    expected = judge(tied)
    torch.testing.assert_close(logits_of(model, context, PROMPT), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("keep", [True, False], ids=["both", "the head alone"])
def test_a_tied_checkpoint_that_holds_the_head(tied, keep):
    expected = judge(tied)
    rewrite(tied, lambda t: t.update({HEAD: (t[EMBEDDING] if keep else t.pop(EMBEDDING)).clone()}))
    model, context = load_through_transformers(tied)
    assert model._model.lm_head.weight is model._model.model.embed_tokens.weight
    torch.testing.assert_close(logits_of(model, context, PROMPT), expected, atol=1e-4, rtol=1e-4)


def test_a_head_that_differs_is_not_tied(tied, caplog):
    rewrite(tied, lambda t: t.update({HEAD: t[EMBEDDING] * 2}))
    with caplog.at_level(logging.WARNING):
        model, context = load_through_transformers(tied)
    assert f"{HEAD} and {EMBEDDING} are one by the configuration, but differ" in caplog.text
    expected = judge(tied)
    torch.testing.assert_close(logits_of(model, context, PROMPT), expected, atol=1e-4, rtol=1e-4)


def test_half_precision(folder):
    model, context = load_through_transformers(folder, dtype=torch.bfloat16)
    assert {weight.tensor.dtype for weight in model.weights()} == {torch.bfloat16}
    logits = logits_of(model, context, PROMPT)
    assert logits.dtype == torch.bfloat16
    error = (logits.float() - judge(folder)).norm() / judge(folder).norm()
    assert error < 0.05


def test_it_runs_eagerly():
    assert BaseLLMModel.supports_cuda_graphs
    assert not TransformersModel.supports_cuda_graphs


def test_a_closed_model_gives_its_memory_back_at_once(folder):
    """An engine is let go while another is built: its weights must not wait for the collector."""
    model, context = load_through_transformers(folder)
    logits_of(model, context, PROMPT)
    watched: list[weakref.ref[object]] = [weakref.ref(weight.tensor) for weight in model.weights()]
    watched += [weakref.ref(model._model.model.embed_tokens.weight), weakref.ref(context.kv_pool)]
    gc.disable()
    try:
        del model, context
        assert [ref for ref in watched if ref() is not None] == []
    finally:
        gc.enable()


def test_flags_of_a_training_run_change_nothing(tmp_path):
    folder = write_tiny_model(tmp_path / "model", "MixtralForCausalLM")
    expected = logits_of(*load_through_transformers(folder), PROMPT)
    values = json.loads((folder / "config.json").read_text())
    values |= {"output_router_logits": True, "use_cache": True}
    (folder / "config.json").write_text(json.dumps(values))
    checkpoint = open_checkpoint(folder, "auto")
    config = read_config(checkpoint.hf_config)
    context = build_context(config)
    model = TransformersModel(config, context)
    load_weights(model, checkpoint, progress=False)
    assert torch.equal(logits_of(model, context, PROMPT), expected)
