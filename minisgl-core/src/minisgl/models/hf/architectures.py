"""Which architectures transformers has; imports no modelling code, which takes a second."""


def known_architectures() -> frozenset[str]:
    """Return the names of all causal language models of transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
