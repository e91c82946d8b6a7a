"""Prompts to token ids: plain text, ids as given, or chat messages through the chat template.

Every way in which a prompt can be wrong ends as a ``RequestError`` that names the field; nothing
here can end the process. Length limits are the scheduler's.

Control tokens that a client writes in chat messages are text. In a plain text prompt they are
control tokens: there the client is the one who writes the template (as with OpenAI-compatible
servers in general).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from minisgl.errors import RequestError
from minisgl.request import MAX_BAD_SEQUENCES, MAX_BAD_TOKENS, SamplingParams, shortened
from minisgl.tokenizer.chat import ChatOptions, ChatTemplate, RenderedChat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TOKEN_ID: Final = 2**31 - 1

MIN_CHARS_PER_TOKEN: Final = 16
"""At least this many are granted: a tokenizer may drop white space between its tokens."""


def max_chars_per_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return how many characters of text one token can stand for at most."""
    return max(MIN_CHARS_PER_TOKEN, *map(len, tokenizer.get_vocab()))


class PromptEncoder:
    """Encodes prompts with one tokenizer.

    Args:
        tokenizer: of the served model.
        vocab_size: of the model; ids from here on are refused. ``None`` leaves that check to the
            scheduler, which knows the model.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", *, vocab_size: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.chat = ChatTemplate(tokenizer)

    def encode(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool = True,
        options: ChatOptions | None = None,
    ) -> list[int]:
        """Return the token ids of ``prompt``, at least one.

        Args:
            prompt: text, token ids, or chat messages.
            add_special_tokens: for text: let the tokenizer add BOS as it is configured to.
            options: for chat: how the messages are rendered.

        Raises:
            RequestError: the prompt is empty, malformed, or refused by the template.
        """
        if isinstance(prompt, str):
            [ids] = self.encode_texts([self.checked_text(prompt, "prompt")], add_special_tokens)
            return self.check_not_empty(ids, is_chat=False)
        if is_chat(prompt):
            return self.encode_rendered(self.chat.render(prompt, options or ChatOptions()))
        return check_token_ids(prompt, self._vocab_size)

    def encode_rendered(self, rendered: RenderedChat) -> list[int]:
        """Return the token ids of a rendered chat, at least one.

        Raises:
            RequestError: it is empty, or no Unicode, or a control token cannot be written as text.
        """
        text = self.checked_text(rendered.text, "messages")
        if rendered.foreign:
            return self.chat.control.encode(text, rendered.foreign)
        # The template writes BOS itself where the model wants one.
        [ids] = self.encode_texts([text], add_special_tokens=False)
        return self.check_not_empty(ids, is_chat=True)

    def encode_texts(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text, from one call."""
        found: list[list[int]] = self._tokenizer(
            list(texts),
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        return found

    @staticmethod
    def checked_text(text: str, param: str) -> str:
        """Return ``text`` if it can be written as UTF-8.

        Raises:
            RequestError: it holds a lone surrogate.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{param} is not valid Unicode: a lone surrogate at character {error.start}",
                param=param,
            ) from error
        return text

    @staticmethod
    def check_not_empty(ids: list[int], *, is_chat: bool) -> list[int]:
        """Return the ids of a prompt.

        Raises:
            RequestError: there are none.
        """
        if ids:
            return ids
        if is_chat:
            raise RequestError(
                "the chat template makes an empty prompt of these messages", param="messages"
            )
        raise RequestError("the prompt is empty", param="prompt")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ``token_ids``; bytes that are no character become U+FFFD.

        Raises:
            RequestError: an id is none of the tokenizer's.
        """
        end = len(self._tokenizer)
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < end:
                raise RequestError(
                    f"tokens must hold token ids from 0 to {end - 1}, got {token_id!r}",
                    param="tokens",
                )
        return str(
            self._tokenizer.decode(
                list(token_ids),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def with_bad_token_ids(self, params: SamplingParams) -> SamplingParams:
        """Return parameters whose ``bad_words`` are in ``bad_token_ids`` too.

        A word is forbidden as it is and behind a space: tokenizers have other tokens for the two.

        Raises:
            RequestError: a word has no tokens or too many, or there are too many words.
        """
        if not params.bad_words:
            return params
        found = list(params.bad_token_ids)
        for word in params.bad_words:
            core = word.lstrip()
            # A sequence that ends with a forbidden one is forbidden by that.
            texts = [self.checked_text(text, "bad_words") for text in (core, f" {core}")]
            for ids in map(tuple, self.encode_texts(texts, add_special_tokens=False)):
                if not ids or not core:
                    raise RequestError(
                        f"bad_words must hold words, got {word!r}, which has no tokens",
                        param="bad_words",
                    )
                if len(ids) > MAX_BAD_TOKENS:
                    raise RequestError(
                        f"bad_words must have at most {MAX_BAD_TOKENS} tokens each; "
                        f"{shortened(word)} has {len(ids)}",
                        param="bad_words",
                    )
                if not any(ids[-len(bad) :] == bad for bad in found):
                    found.append(ids)
        if len(found) > MAX_BAD_SEQUENCES:
            raise RequestError(
                f"bad_words and bad_token_ids make {len(found)} sequences of tokens together; at "
                f"most {MAX_BAD_SEQUENCES} are possible",
                param="bad_words",
            )
        return msgspec.structs.replace(params, bad_token_ids=tuple(found))


def is_chat(prompt: Any) -> bool:
    """Return whether a prompt is a list of chat messages."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)


def check_token_ids(prompt: Any, vocab_size: int | None) -> list[int]:
    """Return ``prompt`` if it is a list of usable token ids.

    Args:
        prompt: whatever was sent.
        vocab_size: ids from here on are refused; ``None`` leaves that to the scheduler.

    Raises:
        RequestError: it is no list, it is empty, or it holds something else.
    """
    if not isinstance(prompt, list | tuple):
        raise RequestError(
            "prompt must be text, token ids or chat messages, "
            f"got a value of type {type(prompt).__name__!r}",
            param="prompt",
        )
    if not prompt:
        raise RequestError("prompt must hold at least one token or message", param="prompt")
    end = MAX_TOKEN_ID + 1 if vocab_size is None else vocab_size
    for token_id in prompt:
        if type(token_id) is not int or not 0 <= token_id < end:
            raise RequestError(
                f"prompt must hold token ids from 0 to {end - 1}, got {token_id!r}",
                param="prompt",
            )
    return list(prompt)
