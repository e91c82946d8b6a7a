"""Token ids to text, token by token; the pieces concatenate to the decode of the whole.

Two ways, chosen by the tokenizer's decoder. Byte-level BPE maps every token to bytes on its own,
so an incremental UTF-8 decoder is all it takes. Everything else (SentencePiece with byte
fallback, WordPiece) depends on neighbours and is decoded in a small sliding window.

Whole means ``tokenizer.decode(ids, clean_up_tokenization_spaces=False)``: the clean-up rewrites
spaces before punctuation, which damages code and cannot be undone once a piece was sent.
"""

import codecs
import re
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT: Final = "\ufffd"
_BYTE_FALLBACK: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TokenKind(Enum):
    """What a token id stands for."""

    TEXT = "text"
    BYTE = "byte"
    """A byte fallback such as ``<0x0A>``."""
    MISSING = "missing"
    """No token: models pad their vocabulary, and a decoder passes over such ids."""


class TextStream(Protocol):
    """The text of one request, as its tokens come."""

    def push(self, token_id: int) -> str:
        """Add one token; return the text that is certain now and was not returned before."""

    def peek(self) -> str:
        """Return the text that would follow if the request ended here, if it is whole text."""

    def finish(self) -> str:
        """Return what was held back; an incomplete character becomes U+FFFD."""

    def describe(self, token_id: int) -> tuple[str, bytes]:
        """Return a token's own text, and the bytes that it would add if it came next."""


class TextDecoder:
    """Makes text streams for one tokenizer; what is known about its tokens is kept here."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._special_ids = _special_ids(tokenizer, self._backend)
        self._token_bytes: dict[int, bytes] | None = (
            {} if type(getattr(self._backend, "decoder", None)).__name__ == "ByteLevel" else None
        )
        self._byte_of_character = _byte_of_character() if self._token_bytes is not None else {}
        self._whole_texts: dict[bool, dict[int, str]] = {False: {}, True: {}}
        self._kinds: dict[int, TokenKind] = {}
        self._piece_bytes: dict[int, bytes] = {}

    def stream(self, *, skip_special_tokens: bool) -> TextStream:
        """Return an empty stream that leaves special tokens out, or not."""
        if self._token_bytes is not None:
            return _ByteLevelStream(self, skip_special_tokens)
        return _WindowStream(self, skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """Return whether ``skip_special_tokens`` leaves the token out."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a byte-level token stands for; an id without a token is empty."""
        assert self._token_bytes is not None
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._token_bytes[token_id] = self._look_up_bytes(token_id)
        return found

    def _look_up_bytes(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        try:
            return bytes(self._byte_of_character[character] for character in token)
        except KeyError:  # an added token, spelt as plain text
            return token.encode()

    def whole_texts(self, *, skip_special_tokens: bool) -> dict[int, str]:
        """Return the texts of byte-level tokens that are whole characters, as far as known.

        One table for all streams: whoever looks a token up adds it.
        """
        return self._whole_texts[skip_special_tokens]

    def kind(self, token_id: int) -> "TokenKind":
        """Return what the token is to a decoder that looks at neighbours."""
        found = self._kinds.get(token_id)
        if found is None:
            token = self._token(token_id)
            if token is None:
                found = TokenKind.MISSING
            else:
                found = TokenKind.BYTE if _BYTE_FALLBACK.fullmatch(token) else TokenKind.TEXT
            self._kinds[token_id] = found
        return found

    def spelling(self, token_id: int) -> str:
        """Return the text of a token alone, special ones included; empty if there is none."""
        return "" if self._token(token_id) is None else self.decode([token_id])

    def piece_bytes(self, token_id: int, before: int | None) -> bytes:
        """Return what a token of a decoder that looks at neighbours adds to a text.

        Args:
            token_id: the token.
            before: the one before it in the text; ``None`` at the text's begin.
        """
        if self.kind(token_id) is TokenKind.MISSING:
            return b""
        if self.kind(token_id) is TokenKind.BYTE:
            return bytes([int(str(self._token(token_id))[3:5], 16)])
        if before is None:
            return self.decode([token_id]).encode()
        found = self._piece_bytes.get(token_id)
        if found is None:
            text = self.decode([before, token_id])[len(self.decode([before])) :]
            found = self._piece_bytes[token_id] = text.encode()
        return found

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ``token_ids``, special ones included."""
        if self._backend is not None:
            text: str = self._backend.decode(token_ids, skip_special_tokens=False)
            return text
        return str(
            self._tokenizer.decode(
                token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _token(self, token_id: int) -> str | None:
        if self._backend is not None:
            token: str | None = self._backend.id_to_token(token_id)
            return token
        converted: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        return converted


class _ByteLevelStream:
    """Bytes of each token through an incremental UTF-8 decoder: constant cost a token.

    Most tokens are whole characters and come between whole characters: their text is in a table.
    """

    __slots__ = ("_decoder", "_is_between", "_skip", "_utf8", "_whole_texts")

    def __init__(self, decoder: TextDecoder, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._whole_texts = decoder.whole_texts(skip_special_tokens=skip_special_tokens)
        self._is_between = True

    def push(self, token_id: int) -> str:
        if self._is_between:
            text = self._whole_texts.get(token_id)
            if text is not None:
                return text
        was_between = self._is_between
        is_hidden = self._skip and self._decoder.is_special(token_id)
        text = "" if is_hidden else self._utf8.decode(self._decoder.token_bytes(token_id))
        self._is_between = not self._utf8.getstate()[0]
        if was_between and self._is_between:
            self._whole_texts[token_id] = text
        return text

    def peek(self) -> str:
        return ""

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    def describe(self, token_id: int) -> tuple[str, bytes]:
        if self._skip and self._decoder.is_special(token_id):
            return self._decoder.spelling(token_id), b""
        data = self._decoder.token_bytes(token_id)
        return data.decode(errors="replace"), data


class _WindowStream:
    """Decodes a window that begins at the last visible piece but one.

    ::

        ids:   [ ... returned ... | context | new ... ]
                                  ^ window begins here

    The context gives the new tokens the neighbour that the decoder wants (a leading space is
    stripped only from the first token of a text). A run of byte-fallback tokens is held until
    another token ends it: one bad byte changes the text of the whole run.
    """

    __slots__ = ("_before", "_decoder", "_num_context", "_skip", "_window")

    def __init__(self, decoder: TextDecoder, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._num_context = 0
        self._before: int | None = None

    def push(self, token_id: int) -> str:
        if self._skip and self._decoder.is_special(token_id):
            return ""
        kind = self._decoder.kind(token_id)
        if kind is TokenKind.MISSING:
            return ""
        self._window.append(token_id)
        self._before = token_id
        if kind is TokenKind.BYTE:
            return ""
        text = self._new_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        del self._window[: self._num_context]
        self._num_context = len(self._window)
        return text

    def peek(self) -> str:
        if len(self._window) == self._num_context:
            return ""
        text = self._new_text()
        return "" if text.endswith(REPLACEMENT) else text

    def finish(self) -> str:
        text = self._new_text() if len(self._window) > self._num_context else ""
        self._window.clear()
        self._num_context = 0
        return text

    def describe(self, token_id: int) -> tuple[str, bytes]:
        if self._skip and self._decoder.is_special(token_id):
            return self._decoder.spelling(token_id), b""
        data = self._decoder.piece_bytes(token_id, self._before)
        return data.decode(errors="replace"), data

    def _new_text(self) -> str:
        text = self._decoder.decode(self._window)
        if not self._num_context:
            return text
        return text[len(self._decoder.decode(self._window[: self._num_context])) :]


def _special_ids(tokenizer: "PreTrainedTokenizerBase", backend: object) -> frozenset[int]:
    """Return the ids that the tokenizer's own decode leaves out as special."""
    if backend is None:
        return frozenset(tokenizer.all_special_ids)
    added = tokenizer.added_tokens_decoder
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _byte_of_character() -> dict[str, int]:
    """Return the inverse of byte-level BPE's alphabet (GPT-2).

    Printable Latin-1 bytes stand for themselves, the other 68 bytes in order for the characters
    from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table
