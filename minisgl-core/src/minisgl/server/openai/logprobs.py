"""Log-probabilities in the shapes of OpenAI's two endpoints, and of vLLM for prompts."""

import codecs
import math
from collections.abc import Sequence
from typing import Any, Final

from minisgl.message import PromptEcho, TokenLogprob, TopLogprob

FLOOR: Final = -9999.0
"""Stands for what JSON cannot hold, as OpenAI documents for tokens of no probability."""


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return ``logprobs`` of a chat choice; tokens without bytes have ``null``."""
    return {"content": _entries(tokens, no_bytes=None), "refusal": None}


def response_logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return ``logprobs`` of a response's text, where OpenAI's ``bytes`` are always a list."""
    return _entries(tokens, no_bytes=[])


def _entries(tokens: Sequence[TokenLogprob], *, no_bytes: list[int] | None) -> list[dict[str, Any]]:
    def entry(token: TopLogprob) -> dict[str, Any]:
        return {
            "token": token.text,
            "logprob": _finite(token.logprob),
            "bytes": list(token.data) or no_bytes,
        }

    return [{**entry(one.chosen), "top_logprobs": list(map(entry, one.top))} for one in tokens]


class CompletionLogprobs:
    """``logprobs`` of one choice of ``/v1/completions``; offsets go on from piece to piece."""

    def __init__(self) -> None:
        self._num_characters = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def piece(
        self, tokens: Sequence[TokenLogprob | None], prompt: PromptEcho | None = None
    ) -> dict[str, Any]:
        """Return the object for the next tokens.

        Args:
            tokens: of the answer, or all of ``prompt``; ``None`` for the prompt's first token,
                which nothing predicts.
            prompt: that the text begins with; its text is whole, whatever follows.
        """
        texts: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token in tokens:
            if token is None:
                text, data = ("", b"") if prompt is None else (prompt.first_text, prompt.first_data)
                texts.append(_spelled(text, data))
                values.append(None)
                tops.append(None)
                offsets.append(self._advance(data))
                continue
            texts.append(_spelled(token.chosen.text, token.chosen.data))
            values.append(_finite(token.chosen.logprob))
            tops.append(_by_text(token))
            offsets.append(self._advance(token.chosen.data))
        if prompt is not None:
            self._num_characters = len(prompt.text)
            self._utf8.reset()
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": texts,
            "top_logprobs": tops,
        }

    def _advance(self, data: bytes) -> int:
        """Return the character at which ``data`` begins, and go on behind it.

        A token that holds the end of a split character begins at that character. Bytes that are no
        UTF-8 are U+FFFD in the text; a held one becomes that when the next byte does not fit.
        """
        settled = len(self._utf8.decode(data[:1]))
        is_held = bool(self._utf8.getstate()[0])
        offset = self._num_characters + max(0, settled + is_held - 1)
        self._num_characters += settled + len(self._utf8.decode(data[1:]))
        return offset


def joined(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return pieces that follow one another as one."""
    return {name: [x for piece in pieces for x in piece[name]] for name in pieces[0]}


def _by_text(token: TokenLogprob) -> dict[str, float]:
    """Return the alternatives by their text; the token itself is always among them.

    OpenAI documents it so. Of several with one text the likeliest has it, and the others their ids.
    """
    values: dict[str, float] = {}
    seen: set[int] = set()
    for top in (*token.top, token.chosen):
        if top.token_id in seen:
            continue
        seen.add(top.token_id)
        text = _spelled(top.text, top.data)
        values[f"token_id:{top.token_id}" if text in values else text] = _finite(top.logprob)
    return values


def _spelled(text: str, data: bytes) -> str:
    """Return a token as text, or as OpenAI spells one that is a part of a character."""
    if "\ufffd" not in text or not data:
        return text
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


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
