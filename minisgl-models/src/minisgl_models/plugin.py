"""The architectures on offer. Imports neither torch nor transformers."""

from collections.abc import Iterable

from minisgl.plugins import ModelRecord, hookimpl

_RECORDS = (
    ModelRecord(
        architectures=("LlamaForCausalLM",),
        config_reader="minisgl_models.llama:read_config",
        model="minisgl_models.llama:LlamaForCausalLM",
        summary="Llama 1 to 3.3 and the many models of its shape, SmolLM2 among them",
    ),
    ModelRecord(
        architectures=("MistralForCausalLM",),
        config_reader="minisgl_models.mistral:read_config",
        model="minisgl_models.mistral:MistralForCausalLM",
        summary="Mistral, with its sliding window",
    ),
    ModelRecord(
        architectures=("Qwen2ForCausalLM",),
        config_reader="minisgl_models.qwen2:read_config",
        model="minisgl_models.qwen2:Qwen2ForCausalLM",
        summary="Qwen2 and Qwen2.5",
    ),
    ModelRecord(
        architectures=("Qwen3ForCausalLM",),
        config_reader="minisgl_models.qwen3:read_config",
        model="minisgl_models.qwen3:Qwen3ForCausalLM",
        summary="Qwen3, dense",
    ),
    ModelRecord(
        architectures=("MixtralForCausalLM",),
        config_reader="minisgl_models.mixtral:read_config",
        model="minisgl_models.mixtral:MixtralForCausalLM",
        summary="Mixtral: routed experts in every layer",
    ),
    ModelRecord(
        architectures=("Qwen2MoeForCausalLM",),
        config_reader="minisgl_models.qwen2_moe:read_config",
        model="minisgl_models.qwen2_moe:Qwen2MoeForCausalLM",
        summary="Qwen1.5-MoE and Qwen2-MoE: routed experts and a shared one",
    ),
    ModelRecord(
        architectures=("OlmoeForCausalLM",),
        config_reader="minisgl_models.olmoe:read_config",
        model="minisgl_models.olmoe:OlmoeForCausalLM",
        summary="OLMoE: routed experts in every layer, norms over all heads",
    ),
    ModelRecord(
        architectures=("Qwen3MoeForCausalLM",),
        config_reader="minisgl_models.qwen3:read_moe_config",
        model="minisgl_models.qwen3:Qwen3MoeForCausalLM",
        summary="Qwen3 with routed experts",
    ),
)


@hookimpl
def minisgl_models() -> Iterable[ModelRecord]:
    """Offer the eight families."""
    return _RECORDS
