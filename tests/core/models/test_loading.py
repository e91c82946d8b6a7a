"""Safetensors checkpoints: every parameter filled exactly once, or a list of what is wrong."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.errors import ModelLoadError
from minisgl.models.loading import fill_dummy, load_weights
from minisgl.models.opening import open_checkpoint
from support.forward import build_context, load_model, load_name, logits_of, read_config, records
from support.tiny_models import write_tiny_model

PROMPT = [5, 100, 30, 7, 200, 18]


@pytest.fixture
def folder(tmp_path):
    return write_tiny_model(tmp_path / "model", "LlamaForCausalLM")


def weights(folder):
    return load_file(folder / "model.safetensors")


def rewrite(folder, tensors):
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


def shard(folder, names, *, index=True):
    tensors = weights(folder)
    (folder / "model.safetensors").unlink()
    half = len(names) // 2
    files = {
        "model-00001-of-00002.safetensors": names[:half],
        "model-00002-of-00002.safetensors": names[half:],
    }
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    if index:
        weight_map = {name: file for file, members in files.items() for name in members}
        text = json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("order", ["sorted", "reversed"])
def test_shards_in_any_order_load_the_same(folder, order, index):
    expected = logits_of(*load_model(folder), PROMPT)
    names = sorted(weights(folder), reverse=order == "reversed")
    # q, k and v of one layer, and gate and up, end up in different files.
    shard(folder, names[::2] + names[1::2], index=index)
    assert torch.equal(logits_of(*load_model(folder), PROMPT), expected)


def test_missing_and_unexpected_names_are_listed(folder):
    tensors = weights(folder)
    tensors["model.layers.0.self_attn.extra.weight"] = torch.zeros(1)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    rewrite(folder, tensors)
    with pytest.raises(ModelLoadError) as error:
        load_model(folder)
    text = str(error.value)
    assert "missing: 1 tensors (model.layers.1.self_attn.k_proj.weight)" in text
    assert "unexpected: 1 tensors (model.layers.0.self_attn.extra.weight)" in text
    assert "LlamaForCausalLM" in text


def test_a_name_in_two_files_is_refused(folder):
    extra = {"model.norm.weight": weights(folder)["model.norm.weight"]}
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file(extra, folder / "b.safetensors")
    with pytest.raises(ModelLoadError, match=r"in several files: 1 tensors \(model.norm.weight\)"):
        load_model(folder)


def test_long_lists_are_cut(folder):
    rewrite(folder, {"model.norm.weight": weights(folder)["model.norm.weight"]})
    with pytest.raises(ModelLoadError, match=r"missing: \d+ tensors \(.* and \d+ more\)"):
        load_model(folder)


def test_wrong_shape_is_named(folder):
    tensors = weights(folder)
    tensors["model.norm.weight"] = torch.zeros(63)
    rewrite(folder, tensors)
    with pytest.raises(ModelLoadError, match=r"model.norm.weight .* shape \[63\].*asks for \[64\]"):
        load_model(folder)


def test_stored_rotary_tables_are_ignored(folder):
    expected = logits_of(*load_model(folder), PROMPT)
    tensors = weights(folder)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    rewrite(folder, tensors)
    assert torch.equal(logits_of(*load_model(folder), PROMPT), expected)


def test_truncated_file_is_named(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is damaged or incomplete"):
        open_checkpoint(folder, "auto")


def test_shard_named_by_the_index_but_absent_is_named(folder):
    shard(folder, sorted(weights(folder)))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"not there: \['model-00002-of-00002.safetensors'\]"):
        open_checkpoint(folder, "auto")


def test_pickles_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="only pickled weights"):
        open_checkpoint(folder, "auto")


def test_folder_without_weights_says_what_is_expected(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"holds no weights; expected model\.safetensors"):
        open_checkpoint(folder, "auto")


def test_folder_without_configuration_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"holds no config\.json"):
        open_checkpoint(tmp_path, "auto")


def test_configuration_without_architecture_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="names no architectures"):
        open_checkpoint(folder, "auto")


def test_broken_configuration_names_the_file(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read"):
        open_checkpoint(folder, "auto")


def test_foreign_code_is_not_run_and_its_configuration_is_still_read(folder):
    """Public case R121."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "acme", "architectures": ["AcmeForCausalLM"], "acme_width": 3}
    config["auto_map"] = {"AutoConfig": "configuration_acme.AcmeConfig"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_acme.py").write_text("raise SystemExit('code of the checkpoint ran')")
    checkpoint = open_checkpoint(folder, "auto")
    assert checkpoint.architectures == ("AcmeForCausalLM",)
    assert checkpoint.hf_config.acme_width == 3


def test_quantized_safetensors_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="quant_method='gptq'"):
        open_checkpoint(folder, "auto")


def test_all_ends_of_text_are_read(folder):
    assert open_checkpoint(folder, "auto").eos_token_ids == (2, 0)
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder, "auto").eos_token_ids == (2,)


def test_tied_head_alone_in_the_checkpoint_fills_the_embedding(tmp_path):
    folder = write_tiny_model(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)
    expected = logits_of(*load_model(folder), PROMPT)
    tensors = weights(folder)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    rewrite(folder, tensors)
    assert torch.equal(logits_of(*load_model(folder), PROMPT), expected)


def test_tied_head_stored_twice_is_tied(tmp_path):
    folder = write_tiny_model(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)
    expected = logits_of(*load_model(folder), PROMPT)
    tensors = weights(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    rewrite(folder, tensors)
    model, context = load_model(folder)
    assert torch.equal(logits_of(model, context, PROMPT), expected)
    assert model.head.weight is model.embedding.weight


def test_tied_head_that_differs_is_taken_at_its_word(tmp_path, caplog):
    folder = write_tiny_model(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)
    tied = logits_of(*load_model(folder), PROMPT)
    tensors = weights(folder)
    tensors["lm_head.weight"] = -tensors["model.embed_tokens.weight"]
    rewrite(folder, tensors)
    with caplog.at_level(logging.WARNING):
        model, context = load_model(folder)
    torch.testing.assert_close(logits_of(model, context, PROMPT), -tied)
    assert "not tied" in caplog.text


def test_weights_are_cast_to_the_models_dtype(folder):
    model, _ = load_model(folder, dtype=torch.bfloat16)
    expected = weights(folder)["model.norm.weight"].bfloat16()
    assert torch.equal(model.norm.weight, expected)


def test_merged_weights_are_the_parts_in_order(folder):
    model, _ = load_model(folder)
    tensors = weights(folder)
    attention = [tensors[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkv"]
    mlp = [tensors[f"model.layers.0.mlp.{p}_proj.weight"] for p in ("gate", "up")]
    assert torch.equal(model.blocks[0].attention.qkv.weight, torch.cat(attention))
    assert torch.equal(model.blocks[0].mlp.gate_up.weight, torch.cat(mlp))


def test_dummy_weights_repeat_for_a_seed_and_give_finite_logits(folder):
    (folder / "model.safetensors").unlink()
    checkpoint = open_checkpoint(folder, "dummy")
    record = records()[checkpoint.architectures[0]]
    config = load_name(record.config_reader)(checkpoint.hf_config)
    outputs = []
    for seed in (0, 0, 1):
        context = build_context(config)
        model = load_name(record.model)(config, context)
        fill_dummy(model, seed)
        outputs.append(logits_of(model, context, PROMPT))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert all(output.isfinite().all() and output.std() > 0 for output in outputs)


def test_progress_counts_every_tensor(folder, capsys):
    config = read_config(folder)
    checkpoint = open_checkpoint(folder, "auto")
    model = load_name(records()["LlamaForCausalLM"].model)(config, build_context(config))
    load_weights(model, checkpoint, progress=True)
    output = capsys.readouterr()
    assert "Loading weights: 100%" in output.err
    assert f"{checkpoint.num_tensors}/{checkpoint.num_tensors}" in output.err
    assert output.out == ""
