"""What clients get back, whole or as a stream: what both endpoints of OpenAI have in common."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from minisgl.message import TextReply
from minisgl.server.chunks import ChunkEncoder
from minisgl.server.generation import Generation
from minisgl.server.openai.fields import GenerationFields
from minisgl.server.streaming import DONE
from minisgl.server.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What identifies one answer.

    Attributes:
        label: the request's id, as the client knows it.
        model: name that the client knows the model by.
        created: Unix time in seconds.
    """

    label: str = field(default_factory=lambda: uuid.uuid4().hex)
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, prefix: str, object_name: str) -> dict[str, Any]:
        """Return the fields that begin every answer and chunk."""
        return {
            "id": f"{prefix}-{self.label}",
            "object": object_name,
            "created": self.created,
            "model": self.model,
        }


class Answer(ABC):
    """The answer to one HTTP request.

    Args:
        head: identifies it.
        asked: the request.
        num_prompts: each has ``asked.n`` choices.
    """

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]

    def __init__(self, head: AnswerHead, asked: GenerationFields, num_prompts: int = 1) -> None:
        self._head = head
        self._asked = asked
        self._num_choices = num_prompts * asked.n
        self._usage = Usage(asked.n)
        self._encoder = ChunkEncoder(
            head.fields(self.id_prefix, self.chunk_object_name),
            nulls_usage=asked.include_usage,
        )

    @abstractmethod
    def _add(self, index: int, reply: TextReply) -> None:
        """Take a reply for the whole answer."""

    @abstractmethod
    def _whole(self) -> dict[str, Any]:
        """Return the fields of the whole answer beside its head and ``usage``."""

    @abstractmethod
    def _events(self, index: int, reply: TextReply) -> list[bytes]:
        """Return the events that a reply of a stream leads to."""

    async def collect(self, generation: Generation) -> dict[str, Any]:
        """Return the whole answer once every choice has ended.

        Raises:
            RequestError: a prompt was refused or failed.
        """
        async for index, reply in generation:
            self._usage.add(index, reply)
            self._add(index, reply)
        head = self._head.fields(self.id_prefix, self.object_name)
        return {**head, **self._whole(), "usage": self._usage.openai()}

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield the stream: content, one finish chunk a choice, usage if asked for, ``[DONE]``.

        What is there at once leaves at once, as one piece.

        Raises:
            RequestError: a prompt failed on the way.
        """
        async for replies in generation.batches():
            events: list[bytes] = []
            for index, reply in replies:
                self._usage.add(index, reply)
                events += self._events(index, reply)
            if events:
                yield b"".join(events)
        if self._asked.include_usage:
            yield self._encoder.chunk([], self._usage.openai())
        yield DONE

    def _chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        """Return a chunk with one choice, with the counts so far if they are asked for."""
        usage = self._usage.openai() if self._asked.continuous_usage else None
        return self._encoder.chunk([choice], usage, **more)
