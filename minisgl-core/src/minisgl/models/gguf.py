"""GGUF files as checkpoints: their header as a Hugging Face configuration, their tensors renamed.

llama.cpp's format holds the same models under other names, quantized, and for Llama with the
rows of q and k permuted (its RoPE turns neighbouring elements); all of that is undone here.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from minisgl.errors import ModelLoadError
from minisgl.layers.rope_config import RopeConfig
from minisgl.layers.rotary import inverse_frequencies
from minisgl.models.checkpoint import Checkpoint, configurations_alone
from minisgl.models.gguf_file import GGUFFile

_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "olmoe": ("olmoe", "OlmoeForCausalLM"),
}
"""``general.architecture`` to transformers' model type and architecture."""

_MIXTRAL = ("mixtral", "MixtralForCausalLM")
"""What ``llama`` means if the header counts experts."""

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""llama.cpp's names to Hugging Face's; with ``{}`` for tensors that stack all experts."""

_MIXTRAL_NAMES = _NAMES | {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}

_NAME = re.compile(
    r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)(?:\.(?P<expert>\d+))?\.(?P<kind>weight|bias)"
)
"""With ``expert`` in files of before April 2024, which do not stack them."""
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_RANGE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_CONTEXT = 8192


class GGUFCheckpoint(Checkpoint):
    """A GGUF file; its tensors come dequantized to float32.

    Raises:
        ModelLoadError: the file is damaged, or its architecture or RoPE is not supported.
    """

    def __init__(self, path: Path, *, with_weights: bool = True) -> None:
        self.path = path
        self._file = GGUFFile(path)
        if with_weights:
            self._file.check_data()
        self.hf_config = read_hf_config(self._file)
        self.architectures = tuple(self.hf_config.architectures)
        self.eos_token_ids = _eos_token_ids(self._file)
        self._permuted = self._file.require("general.architecture") == "llama"
        names = _MIXTRAL_NAMES if self.architectures == _MIXTRAL[1:] else _NAMES
        self._names = [
            (name, hf_name)
            for name in (self._file.tensor_names() if with_weights else ())
            if name != _ROPE_FACTORS
            for hf_name in [_hf_name(name, names)]
        ]

    @property
    def num_tensors(self) -> int:
        """See the base class."""
        return sum(1 for _ in self.names())

    def names(self) -> Iterator[str]:
        """See the base class."""
        for name, hf_name in self._names:
            if "{}" in hf_name:
                yield from (hf_name.format(i) for i in range(self._file.shape(name)[0]))
            else:
                yield hf_name

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See the base class."""
        for name, hf_name in self._names:
            if "{}" in hf_name:
                for expert, part in enumerate(self._file.slices(name)):
                    yield hf_name.format(expert), part
            else:
                yield hf_name, self._unpermuted(hf_name, self._file.tensor(name))

    def _unpermuted(self, hf_name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Undo llama.cpp's pairing of neighbouring rows within each head of q and k.

        And give a shared expert's gate back its one row.
        """
        if hf_name.endswith(".shared_expert_gate.weight"):
            return tensor.reshape(1, -1)
        if not self._permuted or ".self_attn." not in hf_name:
            return tensor
        if ".q_proj." in hf_name:
            heads = self.hf_config.num_attention_heads
        elif ".k_proj." in hf_name:
            heads = self.hf_config.num_key_value_heads
        else:
            return tensor
        half = tensor.shape[0] // heads // 2
        paired = tensor.reshape(heads, half, 2, *tensor.shape[1:])
        return paired.transpose(1, 2).reshape(tensor.shape)


def read_hf_config(file: GGUFFile) -> Any:
    """Return the transformers configuration that a GGUF header describes.

    Raises:
        ModelLoadError: the architecture or its RoPE is not supported.
    """
    name = file.require("general.architecture")
    if name not in _ARCHITECTURES:
        raise ModelLoadError(
            f"{file.path} holds the architecture {name!r}, which is not read from GGUF; supported: "
            f"{', '.join(_ARCHITECTURES)}; use its safetensors form"
        )
    with_experts = name == "llama" and file.value("llama.expert_count", 0)
    model_type, architecture = _MIXTRAL if with_experts else _ARCHITECTURES[name]
    names = file.tensor_names()
    num_heads = file.require(f"{name}.attention.head_count")
    hidden_size = file.require(f"{name}.embedding_length")
    values: dict[str, Any] = {
        "architectures": [architecture],
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.require(f"{name}.feed_forward_length"),
        "num_hidden_layers": file.require(f"{name}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.value(f"{name}.attention.head_count_kv", num_heads),
        "head_dim": file.value(f"{name}.attention.key_length", hidden_size // num_heads),
        "max_position_embeddings": file.require(f"{name}.context_length"),
        "rms_norm_eps": file.require(f"{name}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": file.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.value("tokenizer.ggml.padding_token_id"),
        "dtype": _dtype(file.types()),
    }
    if name != "qwen2":
        values["qkv_bias" if name == "qwen2moe" else "attention_bias"] = (
            "blk.0.attn_q.bias" in names
        )
    if name == "llama":
        values["mlp_bias"] = "blk.0.ffn_up.bias" in names
    values |= _expert_values(file, name, values)
    values["rope_parameters"] = _rope_parameters(file, name, values["head_dim"])
    with configurations_alone():
        return AutoConfig.for_model(model_type, **values)


def _expert_values(file: GGUFFile, name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return what a configuration says about experts; nothing if there are none.

    Headers do not say whether weights are renormalized: llama.cpp does it for all models of an
    architecture or for none.
    """
    if not file.value(f"{name}.expert_count", 0):
        return {}
    num_experts = file.require(f"{name}.expert_count")
    common = {"num_experts_per_tok": file.require(f"{name}.expert_used_count")}
    if name == "llama":
        return common | {"num_local_experts": num_experts}
    common |= {"num_experts": num_experts, "norm_topk_prob": name == "qwen3moe"}
    if name == "olmoe":
        return common | {"clip_qkv": file.value("olmoe.attention.clamp_kqv")}
    names, layers = file.tensor_names(), range(values["num_hidden_layers"])
    sparse = [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" in names]
    common["mlp_only_layers"] = [layer for layer in layers if layer not in sparse]
    if sparse:
        common["moe_intermediate_size"] = file.shape(f"blk.{sparse[0]}.ffn_up_exps.weight")[1]
    if sparse and name == "qwen2moe":
        shared = file.shape(f"blk.{sparse[0]}.ffn_up_shexp.weight")[0]
        common["shared_expert_intermediate_size"] = shared
    return common


def _rope_parameters(file: GGUFFile, name: str, head_dim: int) -> dict[str, Any]:
    theta = float(file.value(f"{name}.rope.freq_base", 10000.0))
    kind = file.value(f"{name}.rope.scaling.type", "none")
    common = {"rope_theta": theta}
    if _ROPE_FACTORS in file.tensor_names():
        return common | _llama3_parameters(file, theta, head_dim)
    if kind == "none":
        return common | {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise ModelLoadError(
            f"the header of {file.path} asks for RoPE scaling {kind!r}; supported: none, linear, "
            "yarn; use the safetensors checkpoint"
        )
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": float(file.require(f"{name}.rope.scaling.factor")),
    }
    if kind == "yarn":
        original = file.value(f"{name}.rope.scaling.original_context_length")
        if original:
            scaling["original_max_position_embeddings"] = original
    return common | scaling


def _llama3_parameters(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Recover Llama 3's parameters from the table of factors that GGUF holds in their place."""
    factors = file.tensor(_ROPE_FACTORS)
    parameters = {"factor": float(factors.max()), **_LLAMA3_RANGE}
    rope = RopeConfig(
        rope_type="llama3",
        theta=theta,
        rotary_dim=head_dim,
        original_max_position=_LLAMA3_CONTEXT,
        parameters=parameters,
    )
    plain = RopeConfig(
        rope_type="default", theta=theta, rotary_dim=head_dim, original_max_position=_LLAMA3_CONTEXT
    )
    expected = inverse_frequencies(plain, 1)[0] / inverse_frequencies(rope, 1)[0]
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-3):
        raise ModelLoadError(
            f"{_ROPE_FACTORS} in {file.path} are not those of Llama 3.1 to 3.3, and others are not "
            "supported; use the safetensors checkpoint"
        )
    return {
        "rope_type": "llama3",
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
        **parameters,
    }


def _hf_name(name: str, names: Mapping[str, str]) -> str:
    """Return Hugging Face's name of a tensor, or its own if unknown (loading then lists it)."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    expert = match["expert"]
    part = match["part"] if expert is None else f"{match['part']}_exps"
    if part not in names:
        return name
    layer = f"model.layers.{match['layer']}." if match["layer"] else ""
    stem = names[part] if expert is None else names[part].format(expert)
    return f"{layer}{stem}.{match['kind']}"


def _dtype(types: frozenset[str]) -> str:
    """Return the dtype to compute in: the file's own, and bfloat16 for quantized ones."""
    if types <= {"F32"}:
        return "float32"
    return "float16" if types <= {"F32", "F16"} else "bfloat16"


def _eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Return the ends of text, of turn and of message that the header names."""
    ids = (file.value(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(int(token) for token in ids if token is not None))
