"""Load the tokenizer of a checkpoint: a Hugging Face folder, or a GGUF header.

GGUF tokenizers are rebuilt here, from the header's tokens, merges and the name of its
pre-tokenizer, so that the ids are those of the original; transformers' own conversion ignores
that name.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from minisgl.errors import ModelLoadError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from minisgl.models.gguf_file import GGUFFile

_WAY_OUT = (
    "name a folder that holds the original tokenizer: --tokenizer PATH (setting model.tokenizer); "
    "LLM does without one if model.skip_tokenizer_init is set"
)
_CONTROL, _USER_DEFINED = 3, 4
"""Of ``tokenizer.ggml.token_type``: special tokens, and others that are matched as a whole."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of OpenAI's cl100k, which Llama 3 and Qwen vary in how many digits they keep."""


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, bytes_only])


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _words(r"\p{N}{1,3}")


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _words(r"\p{N}")


_PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = MappingProxyType(
    {
        "smollm": _smollm,
        "gpt-2": _gpt2,
        "llama-bpe": _llama3,
        "llama3": _llama3,
        "llama-v3": _llama3,
        "qwen2": _qwen2,
    }
)
"""By ``tokenizer.ggml.pre``."""


def load_tokenizer(path: Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a folder or a ``.gguf`` file, with its chat template.

    Code that a folder brings along is never run.

    Raises:
        ModelLoadError: there is none, or it is of a kind that cannot be rebuilt exactly.
    """
    if path.suffix == ".gguf":
        # It brings torch along, which a tokenizer process does well without.
        from minisgl.models.gguf_file import GGUFFile

        return _from_gguf(GGUFFile(path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever the tokenizer's parts do
        raise ModelLoadError(
            f"{path} holds no tokenizer that transformers can load ({_first_line(error)}); "
            f"{_WAY_OUT}"
        ) from error
    if len(tokenizer) <= len(getattr(tokenizer, "added_tokens_decoder", ())):
        # Of a folder with nothing but config.json transformers makes one of special tokens alone.
        raise ModelLoadError(
            f"{path} holds no tokenizer: transformers makes one of {len(tokenizer)} tokens of it, "
            f"all of them special; {_WAY_OUT}"
        )
    return tokenizer


def _from_gguf(file: "GGUFFile") -> "PreTrainedTokenizerBase":
    model = file.value("tokenizer.ggml.model")
    pre = file.value("tokenizer.ggml.pre")
    if model != "gpt2":
        raise ModelLoadError(
            f"{file.path} holds a tokenizer of the kind {model!r}; only 'gpt2' (byte-level BPE) is "
            f"rebuilt from GGUF; {_WAY_OUT}"
        )
    if pre not in _PRE_TOKENIZERS:
        raise ModelLoadError(
            f"{file.path} asks for the pre-tokenizer {pre!r} (tokenizer.ggml.pre); known: "
            f"{', '.join(_PRE_TOKENIZERS)}.{nearest(str(pre), _PRE_TOKENIZERS)} To use this file, "
            f"{_WAY_OUT}"
        )
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    tokenizer = _byte_level_bpe(file, tokens, pre)
    ids = {
        name: file.value(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    named = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    is_llama3 = _PRE_TOKENIZERS[pre] is _llama3
    tokenizer.post_processor = _post_processor(
        named.get("bos_token") if file.value("tokenizer.ggml.add_bos_token", is_llama3) else None,
        named.get("eos_token") if file.value("tokenizer.ggml.add_eos_token", False) else None,
        tokens,
    )
    architecture = file.require("general.architecture")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=file.require(f"{architecture}.context_length"),
        clean_up_tokenization_spaces=False,
        **named,
    )
    wrapped.chat_template = file.value("tokenizer.chat_template")
    return wrapped


def _byte_level_bpe(file: "GGUFFile", tokens: Sequence[str], pre: str) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in file.require("tokenizer.ggml.merges")]
    kinds = file.value("tokenizer.ggml.token_type", [])
    is_llama3 = _PRE_TOKENIZERS[pre] is _llama3
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as it is, even where no merges lead to it.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=is_llama3))
    if _PRE_TOKENIZERS[pre] is _qwen2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _post_processor(bos: str | None, eos: str | None, tokens: Sequence[str]) -> Any:
    """Add the beginning and the end of text where the header asks for them."""
    byte_level = processors.ByteLevel(trim_offsets=False)
    around = [token for token in (bos, eos) if token is not None]
    if not around:
        return byte_level
    before = [bos] if bos is not None else []
    after = [eos] if eos is not None else []
    pair = [f"{token}:1" for token in before] + ["$B:1"] + [f"{token}:1" for token in after]
    template = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *pair],
        special_tokens=[(token, tokens.index(token)) for token in dict.fromkeys(around)],
    )
    return processors.Sequence([byte_level, template])


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
