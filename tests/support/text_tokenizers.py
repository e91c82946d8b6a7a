"""Small tokenizers of the two common kinds, built without a model and without torch."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'forbidden' %}{{ raise_exception('no such role here') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ENDOFTEXT_ID, IM_START_ID, IM_END_ID = 0, 1, 2

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("ð", "Ł")]
PIECES = ["▁", "▁Hello", "▁world", "lo", "wor", "▁the", "▁quick", "é", "▁x", ".", "日", *"abcdeh"]


def byte_level() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer (GPT-2, Llama 3, Qwen) that splits emoji into tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in MERGES)]
    bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=MERGES)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return _wrapped(tokenizer, bos_token="<|endoftext|>", eos_token="<|im_end|>")


def sentencepiece(*, add_bos: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 2's: word pieces with byte fallback, a space stripped."""
    specials = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*specials, *byte_tokens, *PIECES]
    scores = [0.0] * 3 + [-20.0] * 256 + [-1.0 - len(PIECES) / 1000] * len(PIECES)
    vocabulary: list[tuple[str, float]] = list(zip(tokens, scores, strict=True))
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    if add_bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _wrapped(tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def write_byte_level(folder: Path) -> Path:
    """Save the byte-level tokenizer as a folder that ``AutoTokenizer`` loads."""
    byte_level().save_pretrained(folder)
    return folder


def _wrapped(tokenizer: Tokenizer, **named: Any) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
