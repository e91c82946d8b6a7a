"""How a chat is asked of the engine, whatever protocol it came in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from fastapi import Request

from minisgl.errors import RequestError
from minisgl.message import TokenizeOnly
from minisgl.parsing.answer import AnswerParser
from minisgl.parsing.tool_choice import ToolPlan
from minisgl.request import SamplingParams
from minisgl.server.chat.reading import ChoiceReader
from minisgl.server.client import EngineClient
from minisgl.server.errors import in_words_of, new_name
from minisgl.server.fields import RequestParser
from minisgl.server.generation import Generation
from minisgl.server.openai.chat_request import ChatRequest
from minisgl.server.openai.fields import choice_params
from minisgl.server.served_model import ServedModel
from minisgl.server.streaming import unless_disconnected


@dataclass(frozen=True, slots=True)
class StartedChat:
    """A chat that the engine works on.

    Attributes:
        generation: its replies; whoever holds this closes it.
        reader: makes what reads the text of one answer.
    """

    generation: Generation
    reader: Callable[[], ChoiceReader]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatService:
    """What every chat protocol needs of the server.

    Attributes:
        client: the way to the engine.
        model: what is served.
        parser: of request bodies.
    """

    client: EngineClient
    model: ServedModel
    parser: RequestParser

    def start(
        self, asked: ChatRequest, client_names: Mapping[str, str] | None = None
    ) -> StartedChat:
        """Send a chat to the engine.

        Args:
            asked: the chat.
            client_names: of fields in the client's protocol, by those of a chat.

        Raises:
            RequestError: fields contradict one another, or one is outside its range.
        """
        with in_words_of(client_names or {}):
            return self._start(asked, client_names or {})

    def _start(self, asked: ChatRequest, others: Mapping[str, str]) -> StartedChat:
        asked.check_together()
        self._check_lengths(asked)
        parsers = self.model.parsers
        plan = asked.tool_plan()
        parsers.check(plan)
        params = _with_plan(asked.sampling_params(), plan, shows=parsers.special_tokens(plan))
        constrained = params.grammar is not None
        tags = parsers.reasoning_tags(constrained=constrained)
        params = msgspec.structs.replace(params, reasoning=tags)
        names = asked.engine_names()
        if (field := plan.grammar_field()) is not None:
            names["grammar"] = field
        names = {**others, **{key: new_name(name, others) for key, name in names.items()}}
        generation = self.client.generate(
            [asked.messages],
            [choice_params(params, number) for number in range(asked.n)],
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            timeout=asked.timeout,
            options={
                **asked.template_options(),
                "tools": plan.template_tools,
                "return_prompt_tail": parsers.needs_prompt_tail,
            },
            names=names,
        )
        if plan.mode == "none" and not parsers.reasons(constrained=constrained):
            return StartedChat(generation, ChoiceReader)

        def create(prompt_tail: str) -> AnswerParser:
            return parsers.create(plan, prompt_tail=prompt_tail, constrained=constrained)

        return StartedChat(
            generation, partial(ChoiceReader, create, shows_reasoning=asked.include_reasoning)
        )

    async def count_tokens(self, request: Request, asked: ChatRequest) -> int:
        """Return the number of tokens of a chat's prompt.

        Raises:
            RequestError: the messages cannot be rendered.
            ClientGoneError: nobody waits for the answer any more.
        """
        self._check_lengths(asked)
        options: dict[str, Any] = asked.template_options()
        options["tools"] = asked.tool_plan().template_tools

        def ask(uid: int) -> TokenizeOnly:
            return TokenizeOnly(uid, asked.messages, **options)

        reply = await unless_disconnected(request.receive, self.client.tokens(ask))
        return len(reply.token_ids)

    def _check_lengths(self, asked: ChatRequest) -> None:
        others = (asked.tools, asked.chat_template_kwargs)
        self.model.check_chat(asked.messages, asked.texts(), others)


def _with_plan(params: SamplingParams, plan: ToolPlan, *, shows: bool) -> SamplingParams:
    """Return parameters that make the model call tools as it must, so that the call can be read.

    Raises:
        RequestError: the text must already look like something else.
    """
    grammar = plan.grammar()
    if grammar is None:
        grammar = params.grammar
    elif params.grammar is not None:
        raise RequestError(
            f"tool_choice demands a call, and another field {params.grammar.kind}; "
            "send one of them",
            param="tool_choice",
        )
    skips = params.skip_special_tokens and not shows
    return msgspec.structs.replace(params, grammar=grammar, skip_special_tokens=skips)
