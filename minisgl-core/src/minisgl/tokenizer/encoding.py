"""Prompts to token ids: plain text, ids as given, or chat messages through the chat template.

Every way in which a prompt can be wrong ends as a ``RequestError`` that names the field; nothing
here can end the process. Length limits are the scheduler's.
"""

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from minisgl.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MAX_TOKEN_ID: Final = 2**31 - 1
UNSUPPORTED_MESSAGE_FIELDS: Final = ("tool_calls", "tool_call_id", "function_call", "audio")


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
        self._reserved_kwargs = frozenset(
            name
            for name, parameter in inspect.signature(
                tokenizer.apply_chat_template
            ).parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ) | {"messages"}

    def encode(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the token ids of ``prompt``, at least one.

        Args:
            prompt: text, token ids, or chat messages.
            add_special_tokens: for text: let the tokenizer add BOS as it is configured to.
            template_kwargs: for chat: extra variables of the template.
            add_generation_prompt: for chat: end with the header of the assistant's turn.

        Raises:
            RequestError: the prompt is empty, malformed, or refused by the template.
        """
        if isinstance(prompt, str):
            ids = self._encode_text(prompt, add_special_tokens=add_special_tokens, param="prompt")
            if not ids:
                raise RequestError("the prompt is empty", param="prompt")
            return ids
        if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping):
            return self._encode_chat(prompt, template_kwargs or {}, add_generation_prompt)
        return check_token_ids(prompt, self._vocab_size)

    def render(
        self,
        messages: Sequence[Any],
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text that the chat template makes of ``messages``.

        Raises:
            RequestError: a message is malformed, there is no template, or the template raises.
        """
        kwargs = dict(template_kwargs or {})
        if taken := sorted(self._reserved_kwargs.intersection(kwargs)):
            raise RequestError(
                f"chat_template_kwargs cannot set {taken[0]!r}: it is no variable of the template",
                param="chat_template_kwargs",
            )
        checked = [_checked_message(message, index) for index, message in enumerate(messages)]
        if not getattr(self._tokenizer, "chat_template", None):
            raise RequestError(
                "this model has no chat template; send a plain prompt to /v1/completions",
                param="messages",
            )
        try:
            rendered = self._tokenizer.apply_chat_template(
                checked, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
            )
        except Exception as error:
            logger.debug("the chat template raised", exc_info=True)
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        return str(rendered)

    def _encode_chat(
        self,
        messages: Sequence[Any],
        template_kwargs: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> list[int]:
        text = self.render(
            messages, template_kwargs=template_kwargs, add_generation_prompt=add_generation_prompt
        )
        # The template writes BOS itself where the model wants one.
        ids = self._encode_text(text, add_special_tokens=False, param="messages")
        if not ids:
            raise RequestError("the chat template makes an empty prompt of these messages")
        return ids

    def _encode_text(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{param} is not valid Unicode: a lone surrogate at character {error.start}",
                param=param,
            ) from error
        ids: list[int] = self._tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        return ids


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


def _checked_message(message: Any, index: int) -> dict[str, Any]:
    """Return a chat message as templates want it: a role, and its content as one string."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object, got {message!r}", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            f"{where}.role must be a non-empty string, got {role!r}", param=f"{where}.role"
        )
    for name in UNSUPPORTED_MESSAGE_FIELDS:
        if message.get(name):
            raise RequestError(f"{where}.{name} is not supported yet", param=f"{where}.{name}")
    checked = {key: value for key, value in message.items() if value is not None}
    if role == "developer":  # OpenAI's newer name for the same turn; templates know only this one
        checked["role"] = "system"
    checked["content"] = _joined_content(message.get("content"), where)
    return checked


def _joined_content(content: Any, where: str) -> str:
    """Return a message's content as one string; its text parts are put together as they are."""
    where = f"{where}.content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(
            f"{where} must be a string or a list of text parts, got {content!r}", param=where
        )
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise RequestError(
                f"{where} may only hold parts of type 'text', got {kind or part!r}: "
                "images, audio and files are not supported",
                param=where,
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(
                f"{where}: 'text' must be a string, got {part.get('text')!r}", param=where
            )
        texts.append(part["text"])
    return "".join(texts)
