"""Every causal language model of transformers, tiny: it is refused, or its logits are exact."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from minisgl.errors import ModelLoadError
from minisgl.models.hf.build import build
from minisgl.models.hf.config import TransformersConfig, read_config
from minisgl.models.hf.model import TransformersModel
from support.forward import build_context, make_batch

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "vocab_size": 263,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 5,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAX_PARAMETERS = 10_000_000
"""Some configurations nest what the sizes do not reach; what stays large is left out."""

KNOWN_TO_RUN = {
    *("apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2"),
    *("gemma3_text", "glm", "glm4", "gpt2", "gpt_neox", "granite", "helium", "llama", "ministral"),
    *("mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt"),
    *("phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
    *("stablelm", "starcoder2"),
}


def tiny(model_type: str) -> Any:
    """Return a small configuration, or ``None`` where the family wants other sizes."""
    cls = CONFIG_MAPPING[model_type]
    try:
        usual = cls()
        names = cls.attribute_map
        values = {name: v for name, v in SIZES.items() if hasattr(usual, name) or name in names}
        types = getattr(usual, "layer_types", None)
        if types and not isinstance(getattr(cls, "layer_types", None), property):
            values["layer_types"] = (list(dict.fromkeys(types)) * 3)[:3]
        config = cls(**values)
    except Exception:  # noqa: BLE001  (whatever a family's validation raises)
        return None
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    return config


def relative_error(config: Any, facts: TransformersConfig) -> float:
    """Two rows in two chunks and a decode step, against whole prompts one at a time."""
    cls = getattr(transformers, config.architectures[0])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        judge = cls._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        for parameter in judge.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    context = build_context(facts)
    model = TransformersModel(facts, context)
    state = judge.state_dict()
    for name, weight in model._weights.items():
        weight.tensor.copy_(state[name])
    random = np.random.default_rng(0)
    rows = [random.integers(3, 263, size=length).tolist() for length in (23, 14)]
    cuts = [(0, 7, 22, 23), (0, 9, 13, 14)]
    found: list[list[torch.Tensor]] = [[], []]
    with torch.inference_mode():
        for step in range(3):
            parts = [row[cut[step] : cut[step + 1]] for row, cut in zip(rows, cuts, strict=True)]
            starts = [cut[step] for cut in cuts]
            logits = model.forward(make_batch(context, parts, starts, decode=step == 2))
            first = len(parts[0])
            found[0].append(logits[:first])
            found[1].append(logits[first:])
        expected = []
        for row in rows:
            # Some families are only causal where they are told that nothing is padding.
            mask = torch.ones(1, len(row), dtype=torch.int64)
            output = judge(torch.tensor([row]), attention_mask=mask, use_cache=False)
            expected.append(output.logits[0])
    errors = [
        (torch.cat(parts) - whole).abs().max() / whole.std()
        for parts, whole in zip(found, expected, strict=True)
    ]
    return float(max(errors))


@pytest.mark.slow
def test_what_is_accepted_is_exact():
    accepted, inexact = set(), {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config = tiny(model_type)
        if config is None:
            continue
        try:
            facts = read_config(config)
        except ModelLoadError:
            continue
        meta = build(config, torch.float32, torch.device("meta"))
        if sum(parameter.numel() for parameter in meta.parameters()) > MAX_PARAMETERS:
            continue
        accepted.add(model_type)
        error = relative_error(config, facts)
        if error > 1e-4:
            inexact[model_type] = error
    assert inexact == {}
    assert sorted(KNOWN_TO_RUN - accepted) == []
