"""Tokenizer workers around a tokenizer that needs no transformers: they start in no time."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minisgl.message.sockets import Addresses
from minisgl.message.status import StatusSender
from minisgl.settings import Settings
from minisgl.tokenizer.worker import serve_detokenizer, serve_tokenizer


class LightTokenizer:
    """Every byte is a token; the part of transformers' interface that the workers use."""

    chat_template = "as it is"
    added_tokens_decoder: Mapping[int, SimpleNamespace] = {}

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: i for i, token in enumerate(["<eos>", "<bos>", "<end>", *alphabet])}
        self.backend_tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        self.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.backend_tokenizer.decoder = decoders.ByteLevel()

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab()
        return vocabulary

    def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [found.ids for found in self.backend_tokenizer.encode_batch(texts)]}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        return "".join(message["content"] for message in messages)


def light_tokenizer_main(settings: Settings, addresses: Addresses, status: StatusSender) -> None:
    """Run in place of the tokenizer process."""
    serve_tokenizer(LightTokenizer(), addresses, status)


def light_detokenizer_main(settings: Settings, addresses: Addresses, status: StatusSender) -> None:
    """Run in place of the detokenizer process."""
    serve_detokenizer(LightTokenizer(), addresses, status)
