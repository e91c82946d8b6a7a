"""A model's text into content, reasoning and tool calls, and tool choices into grammars.

Pure: no sockets, no clock, no tokenizer. ``interface`` describes how the API server uses it.
"""

from minisgl.parsing.interface import (
    ContentText,
    ParserContext,
    ParserEvent,
    ReasoningText,
    TextParser,
    ToolCallArguments,
    ToolCallStart,
    new_call_id,
)

__all__ = [
    "ContentText",
    "ParserContext",
    "ParserEvent",
    "ReasoningText",
    "TextParser",
    "ToolCallArguments",
    "ToolCallStart",
    "new_call_id",
]
