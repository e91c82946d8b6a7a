"""Output items of ``/v1/responses``, as they grow and as events of a stream."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from minisgl.message import TokenLogprob
from minisgl.parsing.interface import ToolCallStart
from minisgl.server.openai.logprobs import response_logprobs

Event = tuple[str, dict[str, Any]]
"""Its type, and its fields beside ``sequence_number``."""


class OutputItem(ABC):
    """An item of the output; events go out while it grows.

    Args:
        index: its place in the output.
        prefix: of its id.
    """

    def __init__(self, index: int, prefix: str) -> None:
        self.index = index
        self.id = f"{prefix}_{uuid.uuid4().hex}"
        self._pieces: list[str] = []

    @property
    def content(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    @abstractmethod
    def item(self, status: str) -> dict[str, Any]:
        """Return the item as it is now."""

    @abstractmethod
    def begin(self) -> list[Event]:
        """Return the events that begin it."""

    @abstractmethod
    def more(self, text: str) -> Event:
        """Add text; return the event that carries it."""

    @abstractmethod
    def end(self, status: str) -> list[Event]:
        """Return the events that end it."""

    def _added(self) -> Event:
        fields = {"output_index": self.index, "item": self.item("in_progress")}
        return "response.output_item.added", fields

    def _done(self, status: str) -> Event:
        return "response.output_item.done", {"output_index": self.index, "item": self.item(status)}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index}


class TextItem(OutputItem):
    """A message, or reasoning: an item with one part of text."""

    def __init__(self, index: int, *, is_reasoning: bool) -> None:
        super().__init__(index, "rs" if is_reasoning else "msg")
        self.is_reasoning = is_reasoning
        self._kind = "reasoning_text" if is_reasoning else "output_text"
        self._logprobs: list[dict[str, Any]] = []
        self._unsent: list[dict[str, Any]] = []

    def take_logprobs(self, tokens: Sequence[TokenLogprob]) -> None:
        """Add the log-probabilities of the next tokens."""
        found = response_logprobs(tokens)
        self._logprobs += found
        self._unsent += found

    def item(self, status: str) -> dict[str, Any]:
        """Return the item; reasoning has an empty summary beside its text."""
        parts = [] if status == "in_progress" else [self._part(self.content)]
        if self.is_reasoning:
            return {
                "id": self.id,
                "type": "reasoning",
                "summary": [],
                "content": parts,
                "status": status,
            }
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": parts,
        }

    def begin(self) -> list[Event]:
        """Return the events that begin the item and its part."""
        return [
            self._added(),
            ("response.content_part.added", {**self._place(), "part": self._part("", empty=True)}),
        ]

    def more(self, text: str) -> Event:
        """Return the event that carries more text."""
        self._pieces.append(text)
        fields = {**self._place(), "delta": text}
        if not self.is_reasoning:
            fields["logprobs"], self._unsent = self._unsent, []
        return f"response.{self._kind}.delta", fields

    def end(self, status: str) -> list[Event]:
        """Return the events that end the part and the item."""
        done = {**self._place(), "text": self.content}
        if not self.is_reasoning:
            done["logprobs"] = self._logprobs
        part = {**self._place(), "part": self._part(self.content)}
        return [
            (f"response.{self._kind}.done", done),
            ("response.content_part.done", part),
            self._done(status),
        ]

    def _place(self) -> dict[str, Any]:
        return {**super()._place(), "content_index": 0}

    def _part(self, text: str, *, empty: bool = False) -> dict[str, Any]:
        if self.is_reasoning:
            return {"type": self._kind, "text": text}
        logprobs = [] if empty else self._logprobs
        return {"type": self._kind, "text": text, "annotations": [], "logprobs": logprobs}


class CallItem(OutputItem):
    """A function call."""

    def __init__(self, index: int, call: ToolCallStart) -> None:
        super().__init__(index, "fc")
        self._call = call

    def item(self, status: str) -> dict[str, Any]:
        """Return the item with the arguments so far."""
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call.id,
            "name": self._call.name,
            "arguments": self.content,
        }

    def begin(self) -> list[Event]:
        """Return the event that begins the call."""
        return [self._added()]

    def more(self, text: str) -> Event:
        """Return the event that carries more of the arguments."""
        self._pieces.append(text)
        return "response.function_call_arguments.delta", {**self._place(), "delta": text}

    def end(self, status: str) -> list[Event]:
        """Return the events that end the call."""
        done = {**self._place(), "name": self._call.name, "arguments": self.content}
        return [("response.function_call_arguments.done", done), self._done(status)]
