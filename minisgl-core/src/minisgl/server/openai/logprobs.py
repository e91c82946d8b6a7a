"""Log-probabilities in the shapes of OpenAI's two endpoints, and of vLLM for prompts."""

import math
from collections.abc import Sequence
from typing import Any, Final

from minisgl.message import PromptEcho, TokenLogprob, TopLogprob

FLOOR: Final = -9999.0
"""Stands for what JSON cannot hold, as OpenAI documents for tokens of no probability."""


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return ``logprobs`` of a chat choice."""
    content = [
        {**_entry(token.chosen), "top_logprobs": [_entry(top) for top in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(token: TopLogprob) -> dict[str, Any]:
    return {
        "token": token.text,
        "logprob": _finite(token.logprob),
        "bytes": list(token.data) if token.data else None,
    }


class CompletionLogprobs:
    """``logprobs`` of one choice of ``/v1/completions``; offsets go on from piece to piece."""

    def __init__(self) -> None:
        self._num_characters = 0

    def piece(self, tokens: Sequence[TokenLogprob | None], first: str = "") -> dict[str, Any]:
        """Return the object for the next tokens.

        Args:
            tokens: ``None`` for the prompt's first token, which nothing predicts.
            first: text of that one.
        """
        texts: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token in tokens:
            if token is None:
                texts.append(first)
                values.append(None)
                tops.append(None)
                offsets.append(self._advance(first.encode()))
                continue
            texts.append(token.chosen.text)
            values.append(_finite(token.chosen.logprob))
            tops.append(_by_text(token))
            offsets.append(self._advance(token.chosen.data))
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": texts,
            "top_logprobs": tops,
        }

    def _advance(self, data: bytes) -> int:
        """Return the character at which ``data`` begins, and go on behind it.

        A token that holds the end of a split character begins at that character.
        """
        is_inside = bool(data) and _continues(data[0])
        offset = self._num_characters - is_inside
        self._num_characters += sum(not _continues(byte) for byte in data)
        return max(offset, 0)


def _continues(byte: int) -> bool:
    """Return whether a byte of UTF-8 belongs to a character that began before it."""
    return byte & 0xC0 == 0x80


def _by_text(token: TokenLogprob) -> dict[str, float]:
    """Return the alternatives by their text; of several with one text, the likeliest counts.

    The token itself is always among them, as OpenAI documents.
    """
    values: dict[str, float] = {}
    for top in (*token.top, token.chosen):
        values.setdefault(top.text, _finite(top.logprob))
    return values


def first_token_text(prompt: PromptEcho) -> str:
    """Return the text of a prompt's first token: what the texts of all others leave over."""
    rest = "".join(token.chosen.text for token in prompt.logprobs[1:] if token is not None)
    if prompt.text.endswith(rest):
        return prompt.text[: len(prompt.text) - len(rest)]
    num_bytes = sum(len(token.chosen.data) for token in prompt.logprobs[1:] if token is not None)
    data = prompt.text.encode()
    return data[: max(0, len(data) - num_bytes)].decode(errors="replace")


def prompt_logprobs(prompt: PromptEcho, num_top: int) -> list[dict[str, Any] | None]:
    """Return vLLM's ``prompt_logprobs``: for each token the alternatives by token id.

    Args:
        prompt: with log-probabilities.
        num_top: alternatives to show; the token itself is always among them.
    """
    return [
        None
        if token is None
        else {
            str(top.token_id): {
                "logprob": _finite(top.logprob),
                "rank": top.rank,
                "decoded_token": top.text,
            }
            for top in (token.chosen, *token.top[:num_top])
        }
        for token in prompt.logprobs
    ]


def cut_to(tokens: Sequence[TokenLogprob | None], num_top: int) -> list[TokenLogprob | None]:
    """Return the tokens with at most ``num_top`` alternatives each."""
    return [
        None if token is None else TokenLogprob(token.chosen, token.top[:num_top])
        for token in tokens
    ]


def _finite(value: float) -> float:
    return max(value, FLOOR) if math.isfinite(value) else FLOOR
