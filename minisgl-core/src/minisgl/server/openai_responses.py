"""What clients get back: whole answers and streams in OpenAI's shapes.

One ``Answer`` formats one HTTP request; both endpoints differ only in how a choice looks.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from minisgl.message import TextReply
from minisgl.server.client import Generation
from minisgl.server.streaming import DONE, sse_event


@dataclass(slots=True)
class _Usage:
    """Token counts of all prompts of one HTTP request."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0

    def add(self, reply: TextReply) -> None:
        self.num_prompt_tokens += reply.num_prompt_tokens
        self.num_completion_tokens += reply.num_completion_tokens
        self.num_cached_tokens += reply.num_cached_tokens

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


@dataclass(slots=True)
class Answer(ABC):
    """The answer to one HTTP request.

    Attributes:
        model: name that the client knows the model by.
        num_choices: prompts of the request.
        include_usage: whether a stream ends with a usage chunk.
    """

    model: str
    num_choices: int = 1
    include_usage: bool = False
    id: str = field(init=False)
    created: int = field(init=False)

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]

    def __post_init__(self) -> None:
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    @abstractmethod
    def choice(self, index: int, text: str, finish_reason: str) -> dict[str, Any]:
        """Return one whole choice."""

    @abstractmethod
    def chunk_choice(self, index: int, text: str | None, finish_reason: str | None) -> Any:
        """Return one choice of a chunk; ``text`` is ``None`` in the chunk that only finishes."""

    def opening_choices(self) -> list[dict[str, Any]]:
        """Return the choices of chunks that come before any text."""
        return []

    async def collect(self, generation: Generation) -> dict[str, Any]:
        """Return the whole answer once every prompt has ended.

        Raises:
            RequestError: a prompt was refused or failed.
        """
        usage = _Usage()
        texts: list[list[str]] = [[] for _ in range(self.num_choices)]
        reasons = ["" for _ in range(self.num_choices)]
        async for index, reply in generation:
            texts[index].append(reply.text)
            if reply.finish_reason is not None:
                reasons[index] = reply.finish_reason
                usage.add(reply)
        choices = [
            self.choice(index, "".join(pieces), reasons[index])
            for index, pieces in enumerate(texts)
        ]
        return {**self._head(self.object_name), "choices": choices, "usage": usage.as_json()}

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield the stream: content, one finish chunk a choice, usage if asked for, ``[DONE]``.

        Raises:
            RequestError: a prompt failed on the way.
        """
        usage = _Usage()
        for choice in self.opening_choices():
            yield self._chunk(choice)
        async for index, reply in generation:
            if reply.text:
                yield self._chunk(self.chunk_choice(index, reply.text, None))
            if reply.finish_reason is not None:
                usage.add(reply)
                yield self._chunk(self.chunk_choice(index, None, reply.finish_reason))
        if self.include_usage:
            yield sse_event(
                {**self._head(self.chunk_object_name), "choices": [], "usage": usage.as_json()}
            )
        yield DONE

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = {**self._head(self.chunk_object_name), "choices": [choice]}
        if self.include_usage:
            chunk["usage"] = None
        return sse_event(chunk)

    def _head(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
        }


class ChatAnswer(Answer):
    """``/v1/chat/completions``."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def choice(self, index: int, text: str, finish_reason: str) -> dict[str, Any]:
        """Return the assistant's message."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": finish_reason,
        }

    def chunk_choice(self, index: int, text: str | None, finish_reason: str | None) -> Any:
        """Return a delta of the assistant's message."""
        delta = {} if text is None else {"content": text}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def opening_choices(self) -> list[dict[str, Any]]:
        """Return the chunk that says who speaks."""
        return [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ]


class CompletionAnswer(Answer):
    """``/v1/completions``."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def choice(self, index: int, text: str, finish_reason: str) -> dict[str, Any]:
        """Return the completed text."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def chunk_choice(self, index: int, text: str | None, finish_reason: str | None) -> Any:
        """Return the next piece of the text."""
        return {
            "index": index,
            "text": text or "",
            "logprobs": None,
            "finish_reason": finish_reason,
        }
