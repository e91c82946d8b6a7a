"""Core's own parsers, and how a chat template shows which one its model needs."""

from minisgl.parsing.interface import ParserContext, TextParser
from minisgl.parsing.reasoning import TaggedReasoning
from minisgl.request import ReasoningTags

THINK = ReasoningTags("<think>", "</think>")
IMPLIED_THINK = ReasoningTags("<think>", "</think>", implied=True)
MISTRAL_THINK = ReasoningTags("[THINK]", "[/THINK]")


def hermes_rank(template: str) -> int:
    """Of ``hermes``: the template asks for ``<tool_call>`` with JSON, and not with tags in it."""
    has_tags = "<function=" in template or "<arg_key>" in template
    return 10 if "<tool_call>" in template and not has_tags else 0


def qwen3_coder_rank(template: str) -> int:
    """Of ``qwen3_coder``: the template asks for tags within tags."""
    return 20 if "<function=" in template and "<parameter=" in template else 0


def llama3_json_rank(template: str) -> int:
    """Of ``llama3_json``: the template writes Llama 3's headers and speaks of parameters."""
    is_llama3 = "<|start_header_id|>" in template and "parameters" in template
    return 10 if is_llama3 and "tools" in template else 0


def pythonic_rank(template: str) -> int:
    """Of ``pythonic``: the template shows calls as Python writes them."""
    shows = "<|python_start|>" in template or "func_name1(" in template
    return 20 if shows and "tools" in template else 0


def mistral_rank(template: str) -> int:
    """Of ``mistral``: the template writes Mistral's mark."""
    return 10 if "[TOOL_CALLS]" in template else 0


def never(template: str) -> int:  # noqa: ARG001
    """Of ``deepseek_r1``: only by name, since it takes text without any tag for reasoning."""
    return 0


def qwen3_rank(template: str) -> int:
    """Of ``qwen3``: the template knows the tags."""
    return 10 if "</think>" in template else 0


def mistral_reasoning_rank(template: str) -> int:
    """Of Mistral's reasoning: the template knows its tags."""
    return 10 if "[/THINK]" in template else 0


def think(context: ParserContext) -> TextParser:
    """Read ``<think>...</think>`` where the answer or the prompt opens it."""
    return _tagged(context, THINK)


def implied_think(context: ParserContext) -> TextParser:
    """Read ``</think>`` as the end of reasoning that began with the answer."""
    return _tagged(context, IMPLIED_THINK)


def mistral_think(context: ParserContext) -> TextParser:
    """Read ``[THINK]...[/THINK]``."""
    return _tagged(context, MISTRAL_THINK)


def _tagged(context: ParserContext, tags: ReasoningTags) -> TextParser:
    return TaggedReasoning(context, begin=tags.begin, end=tags.end, implied=tags.implied)
