"""What a model of transformers asks of attention, and what is refused, with its reason."""

import json
import logging
from typing import Any

import pytest
import transformers

from minisgl.errors import ModelLoadError
from minisgl.models.checkpoint import load_hf_config
from minisgl.models.hf.architectures import known_architectures
from minisgl.models.hf.config import read_config

SMALL: dict[str, Any] = {
    "vocab_size": 263,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


def small(family: str, architecture: str = "", **values: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **values})
    config.architectures = [architecture or f"{family}ForCausalLM"]
    return config


def refusal(config: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        read_config(config)
    message = str(caught.value)
    assert message.startswith(f"{config.architectures[0]} cannot run through transformers' ")
    assert "It needs a plugin that offers the architecture" in message
    return message


def test_heads_and_layers_are_those_that_attend():
    config = read_config(small("Llama", head_dim=24, dtype="bfloat16"))
    assert (config.architecture, config.dtype) == ("LlamaForCausalLM", "bfloat16")
    assert (config.vocab_size, config.num_layers, config.max_position) == (263, 3, 128)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (4, 2, 24)
    assert config.sliding_windows == (None, None, None)
    assert not config.logit_soft_cap
    names, specs = zip(*config.attention, strict=True)
    assert names == tuple(f"model.layers.{i}.self_attn" for i in range(3))
    assert [spec.index for spec in specs] == [0, 1, 2]
    assert {spec.scale for spec in specs} == {24**-0.5}


def test_windows_caps_and_scales_are_those_of_each_layer():
    config = read_config(
        small(
            "Gemma2",
            head_dim=16,
            sliding_window=20,
            query_pre_attn_scalar=25,
            attn_logit_softcapping=7.0,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    )
    assert config.sliding_windows == (20, None, 20)
    assert config.logit_soft_cap
    assert {(spec.scale, spec.logit_soft_cap) for _, spec in config.attention} == {(0.2, 7.0)}


def test_names_of_attributes_may_be_the_familys_own():
    config = small("GPT2", "GPT2LMHeadModel", n_inner=96)
    read = read_config(config)
    assert (read.num_q_heads, read.num_kv_heads, read.head_dim) == (4, 4, 16)
    assert (read.max_position, read.num_layers) == (128, 3)


def test_the_configuration_stays_as_it_is():
    config = small("Llama")
    before = config.to_dict()
    read_config(config)
    assert config.to_dict() == before
    assert config._attn_implementation != "minisgl_survey"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            lambda: small("GptOss", num_local_experts=4),
            "asks attention for attention sinks (s_aux)",
        ),
        (lambda: small("Jamba", num_experts=4), "it keeps a recurrent state"),
        (lambda: small("MiniMax"), "it has layers of type linear_attention; supported: full_"),
        (lambda: small("MiniCPM3"), "have 96, 96 and 16 elements a head"),
        (lambda: small("Doge"), "model.layers.0.self_attn has a mask of its own"),
        (lambda: small("Bart"), "its forward takes no position_ids"),
        (lambda: small("Bert", "BertLMHeadModel"), "attention.self is not causal"),
        (lambda: small("DiffLlama"), "model.layers.0.self_attn attends more than once"),
        (lambda: small("XGLM"), "its code does not run without data (ValueError: Attention mask"),
        (lambda: small("GPTNeoXJapanese"), "its layers do not use transformers' attention inter"),
        (
            lambda: small("Gemma3Text", "Gemma3ForCausalLM", use_bidirectional_attention=True),
            "its attention is not causal",
        ),
        (
            lambda: small("Phimoe", sliding_window=5, num_local_experts=4),
            "the mask of model.layers.0.self_attn hides something else than the future",
        ),
        (
            lambda: small("Llama", "LlamaForTokenClassification"),
            "the causal language model of model_type='llama' there is LlamaForCausalLM",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(config, reason):
    assert reason in refusal(config())


def test_a_type_that_transformers_does_not_know_is_refused(tmp_path):
    values = {**SMALL, "model_type": "lama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    message = refusal(load_hf_config(tmp_path))
    assert "the causal language model of model_type='lama' there is none" in message


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_without_tokens_is_refused(monkeypatch, window):
    from transformers.models.mistral import modeling_mistral

    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", lambda **_: None)
    config = small("Mistral")
    config.sliding_window = window
    assert f"has sliding_window={window}; it must be 1 or more" in refusal(config)


def test_layers_that_differ_are_refused(monkeypatch):
    from transformers.models.llama import modeling_llama

    class Wider(modeling_llama.LlamaAttention):  # type: ignore[misc]
        def __init__(self, config, layer_idx):
            wider = transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": 1 + layer_idx % 2})
            wider._attn_implementation = config._attn_implementation
            super().__init__(wider, layer_idx)

    monkeypatch.setattr(modeling_llama, "LlamaAttention", Wider)
    assert "differ in their numbers of q heads, KV heads" in refusal(small("Llama"))


def test_layers_without_attention_are_refused(monkeypatch):
    from transformers.models.llama import modeling_llama

    class Sometimes(modeling_llama.LlamaAttention):  # type: ignore[misc]
        def forward(self, hidden_states, *args, **kwargs):
            if self.layer_idx == 1:
                return hidden_states, None
            return super().forward(hidden_states, *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "LlamaAttention", Sometimes)
    assert "2 of its 3 layers attend, so the others keep another state" in refusal(small("Llama"))


@pytest.mark.parametrize("what", ["window", "future", "chunks"])
def test_a_mask_that_says_something_else_than_the_window_is_refused(monkeypatch, what):
    """Masks are never built at run time: what they hide must be what the backend hides."""
    from transformers.models.mistral import modeling_mistral

    original = modeling_mistral.create_sliding_window_causal_mask
    others = {
        "window": lambda b, h, q, k: k > q - 4,
        "future": lambda b, h, q, k: k <= q + 1,
        "chunks": lambda b, h, q, k: q // 5 == k // 5,
    }
    key = "or_mask_function" if what == "future" else "and_mask_function"

    def create(**kwargs):
        return original(**kwargs, **{key: others[what]})

    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", create)
    assert "what lies beyond sliding_window=5" in refusal(small("Mistral", sliding_window=5))


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}, 32),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}, 256),
    ],
)
def test_frequencies_that_depend_on_the_batch_limit_the_length(caplog, rope, longest):
    with caplog.at_level(logging.WARNING):
        config = read_config(small("Llama", rope_parameters={**rope, "rope_theta": 1e4}))
    assert config.max_position == longest
    assert ("limited to the 32 positions" in caplog.text) == (longest == 32)


def test_known_architectures():
    known = known_architectures()
    assert {"LlamaForCausalLM", "GPT2LMHeadModel", "Gemma3ForCausalLM"} <= known
    assert "LlamaForTokenClassification" not in known
