"""Chooses the parsers of a model's text, once, and makes those of each answer."""

import logging
from dataclasses import dataclass
from typing import Final, TypeVar

from minisgl.errors import RequestError
from minisgl.parsing.answer import AnswerParser
from minisgl.parsing.interface import ParserContext
from minisgl.parsing.tool_choice import ToolPlan
from minisgl.plugins.failure import describe_error
from minisgl.plugins.host import PluginHost
from minisgl.plugins.records import ReasoningParserRecord, ToolParserRecord
from minisgl.plugins.registry import Registry
from minisgl.request import ReasoningTags
from minisgl.settings import Settings

logger = logging.getLogger(__name__)

AUTO: Final = "auto"
NONE: Final = "none"

RecordT = TypeVar("RecordT", ToolParserRecord, ReasoningParserRecord)


@dataclass(frozen=True, slots=True)
class AnswerParsers:
    """The parsers of one server's model; either may be missing."""

    tools: ToolParserRecord | None = None
    reasoning: ReasoningParserRecord | None = None

    @property
    def needs_prompt_tail(self) -> bool:
        """Whether ``create`` must be told the end of the prompt."""
        return self.reasoning is not None

    def check(self, plan: ToolPlan) -> None:
        """Refuse what this server cannot read.

        Raises:
            RequestError: the model may call tools as it likes, and there is no parser for that.
        """
        if plan.mode == "auto" and self.tools is None:
            raise RequestError(
                "tool_choice lets the model call tools as it likes, which needs a parser of this "
                "model's tool calls, and its chat template shows none that is installed: start the "
                "server with --tool-call-parser NAME, or demand a call with tool_choice, or forbid "
                "all",
                param="tool_choice",
            )

    def special_tokens(self, plan: ToolPlan) -> bool:
        """Return whether the text must show special tokens, since calls or reasoning need them."""
        by_tools = (
            plan.mode == "auto" and self.tools is not None and self.tools.shows_special_tokens
        )
        return by_tools or (self.reasoning is not None and self.reasoning.shows_special_tokens)

    def reasoning_tags(self, *, constrained: bool) -> ReasoningTags | None:
        """Return between which tags an answer may reason before a text that a grammar rules."""
        return self.reasoning.tags if constrained and self.reasoning is not None else None

    def reasons(self, *, constrained: bool) -> bool:
        """Return whether answers may hold reasoning."""
        if self.reasoning is None:
            return False
        return not constrained or self.reasoning.tags is not None

    def create(
        self, plan: ToolPlan, *, prompt_tail: str = "", constrained: bool = False
    ) -> AnswerParser:
        """Return the parser of one answer.

        Args:
            plan: what the request wants of tools; ``check`` has passed it.
            prompt_tail: the end of the rendered prompt.
            constrained: a grammar rules the text, behind the reasoning if there may be some.
        """
        constrained = constrained or plan.grammar_field() is not None
        context = ParserContext(
            tools=plan.tools,
            forbidden=plan.forbidden,
            constrained=constrained,
            prompt_tail=prompt_tail,
        )
        reasoning = None
        if self.reasoning is not None and self.reasons(constrained=constrained):
            reasoning = self.reasoning.create(context)
        tools = None
        if plan.mode in ("required", "named"):
            tools = plan.constrained_parser(context)
        elif plan.mode == "auto" and self.tools is not None:
            tools = self.tools.create(context)
        return AnswerParser(reasoning, tools, parallel=plan.parallel)


def select_parsers(host: PluginHost, settings: Settings, template: str) -> AnswerParsers:
    """Return the parsers that the settings name, or that the chat template asks for.

    Args:
        host: the loaded plugins.
        settings: ``server.tool_call_parser`` and ``server.reasoning_parser``: a name, ``auto`` or
            ``none``.
        template: the text of the model's chat template; empty if it has none.

    Raises:
        UnknownBackendError, AmbiguousBackendError: a setting names none, or several.
    """
    server = settings.server
    parsers = AnswerParsers(
        _choose(host.tool_parsers, server.tool_call_parser, template),
        _choose(host.reasoning_parsers, server.reasoning_parser, template),
    )
    logger.info(
        "parsers of the model's text: tool calls %s, reasoning %s",
        parsers.tools.name if parsers.tools else NONE,
        parsers.reasoning.name if parsers.reasoning else NONE,
    )
    return parsers


def check_parsers(host: PluginHost, settings: Settings) -> None:
    """Check the names in the settings, before a model is loaded; errors as ``select_parsers``."""
    server = settings.server
    for registry, choice in (
        (host.tool_parsers, server.tool_call_parser),
        (host.reasoning_parsers, server.reasoning_parser),
    ):
        if choice not in (AUTO, NONE):
            registry.get(choice)


def _choose(registry: Registry[RecordT], choice: str, template: str) -> RecordT | None:
    if choice == NONE:
        return None
    if choice != AUTO:
        return registry.get(choice).record
    best: tuple[int, RecordT | None] = (0, None)
    for offer in registry:
        if offer.name in registry.ambiguous:
            continue
        try:
            rank = offer.record.rank_for(template)
        except Exception as error:
            cause = describe_error(error)
            logger.warning("%s of %s: rank_for raised %s", offer.name, offer, cause)
            logger.debug("traceback of %s", offer, exc_info=error)
            continue
        if rank > best[0]:
            best = (rank, offer.record)
    return best[1]
