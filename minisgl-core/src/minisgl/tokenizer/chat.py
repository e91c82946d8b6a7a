"""Chat messages through the model's own template, and which parts of the text clients wrote."""

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from minisgl.errors import RequestError, without_messages
from minisgl.tokenizer.control_tokens import ControlTokens, Marks, Span
from minisgl.tokenizer.messages import (
    check_messages,
    with_argument_strings,
    with_content_parts,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
logger.addFilter(without_messages)

MAX_TAIL: Final = 4096
"""Characters of ``prompt_tail``."""

FALLBACK_TAIL: Final = 256

_PROBE: Final = {"minisgl_probe": True}
_PROBE_TEXT: Final = "minisgl probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How messages are rendered.

    Attributes:
        tools: functions in OpenAI's form, for templates that show them to the model.
        template_kwargs: extra variables of the template.
        add_generation_prompt: end with the header of the assistant's turn.
        continue_final_message: leave the last message open, so that the answer goes on with it.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered chat.

    Attributes:
        text: what the template made.
        foreign: where control tokens stand in it that clients wrote: those are text.
    """

    text: str
    foreign: tuple[Span, ...] = ()


class ChatTemplate:
    """The chat template of one tokenizer, run in transformers' sandbox.

    Attributes:
        source: its text, or that of all of them where there are several.
        control: the control tokens that only it may write.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self.source = template_source(tokenizer)
        self.control = ControlTokens(tokenizer, self.source)
        knows_developer = re.search(r"""['"]developer['"]""", self.source) is not None
        self._developer_role = "developer" if knows_developer else "system"
        self._shows_tools = re.search(r"\btools\b", self.source) is not None
        self._has_warned = False
        self._reserved = frozenset(
            name
            for name, parameter in inspect.signature(
                tokenizer.apply_chat_template
            ).parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ) | {"messages", "self"}

    def render(self, messages: Sequence[Any], options: ChatOptions) -> RenderedChat:
        """Return the text that the template makes of ``messages``.

        Raises:
            RequestError: a message or an option is malformed, there is no template, the template
                raises, or it changes text that reads like a control token.
        """
        self._check(options)
        checked = check_messages(messages, developer_role=self._developer_role)
        self._warn_of_tools(options)
        if self._wants_argument_strings:
            checked = with_argument_strings(checked)
        if self._wants_parts:
            checked = with_content_parts(checked)
        text = self._apply(checked, options)
        given = (checked, list(options.tools), dict(options.template_kwargs or {}))
        if not self.control.suspects(given):
            return RenderedChat(text)
        marks = Marks(text)
        theirs, tools, kwargs = self.control.marked(given, marks)
        marked = self._apply(
            theirs,
            ChatOptions(
                tools=tools,
                template_kwargs=kwargs,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
            ),
        )
        foreign = self.control.foreign(text, marked, marks)
        if foreign is None:
            token = self.control.first(given)
            what = "may complete a control token" if token is None else f"holds {token!r}"
            raise RequestError(
                f"a text of this request {what}, and the chat template changes that text, so that "
                "nobody can tell it from the template's own control tokens",
                param="messages",
            )
        return RenderedChat(text, tuple(foreign))

    def tail(self, messages: Sequence[Any], options: ChatOptions, text: str) -> str:
        """Return the end of a rendered chat that the template wrote for the answer.

        It is what the header of the answer adds, or the last message if that is continued. If the
        template renders the rest differently without it, it is the last few characters.
        """
        shorter = messages[:-1] if options.continue_final_message else messages
        without = ChatOptions(
            tools=options.tools,
            template_kwargs=options.template_kwargs,
            add_generation_prompt=False,
        )
        try:
            start = self.render(shorter, without).text if shorter else ""
        except RequestError:
            start = ""
        if start and text.startswith(start):
            return text[len(start) :][-MAX_TAIL:]
        return text[-FALLBACK_TAIL:]

    def _check(self, options: ChatOptions) -> None:
        kwargs = options.template_kwargs or {}
        if taken := sorted(self._reserved.intersection(kwargs)):
            raise RequestError(
                f"chat_template_kwargs cannot set {taken[0]!r}: it is no variable of the template",
                param="chat_template_kwargs",
            )
        if options.continue_final_message and options.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true: either the "
                "last message goes on, or a new one begins",
                param="continue_final_message",
            )
        if not self.source:
            raise RequestError(
                "this model has no chat template; send a plain prompt to /v1/completions",
                param="messages",
            )

    def _warn_of_tools(self, options: ChatOptions) -> None:
        """Say once that the model will not hear of tools: a forced call still works without."""
        if options.tools and not self._shows_tools and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "requests offer tools, but this model's chat template does not show them to the "
                "model; this is logged once"
            )

    def _apply(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(options.tools) or None,
                    tokenize=False,
                    add_generation_prompt=options.add_generation_prompt,
                    continue_final_message=options.continue_final_message,
                    **(options.template_kwargs or {}),
                )
            )
        except Exception as error:
            logger.debug("the chat template raised", exc_info=True)
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template needs content as a list of parts, and loses text in a string.

        Those of models for pictures and text do.
        """
        parts = with_content_parts([{"role": "user", "content": _PROBE_TEXT}])
        for messages, wants in (([{"role": "user", "content": _PROBE_TEXT}], False), (parts, True)):
            try:
                if _PROBE_TEXT in self._apply(messages, ChatOptions()):
                    return wants
            except RequestError:
                continue
        return False

    @cached_property
    def _wants_argument_strings(self) -> bool:
        """Whether the template puts arguments of tool calls into the text as they come.

        Most write them as JSON themselves and need objects; given an object, the others raise, or
        write it as Python does.
        """
        if "tool_calls" not in self.source:
            return False
        call = {
            "id": "call00001",
            "type": "function",
            "function": {"name": "f", "arguments": _PROBE},
        }
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00001", "name": "f", "content": "x"},
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": "x"},
        ]
        options = ChatOptions(add_generation_prompt=False)
        try:
            return str(_PROBE) in self._apply(messages, options)
        except RequestError:
            pass
        try:
            self._apply(with_argument_strings(messages), options)
        except RequestError:
            return False
        return True


def template_source(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the text of a tokenizer's chat template, or of all of them; empty if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        return "\n".join(map(str, template.values()))
    return template or ""
