"""Answers of ``/v1/responses``, whole and as a stream of events."""

import time
from collections.abc import AsyncGenerator, Callable, Iterable
from http import HTTPStatus
from typing import Any

from minisgl.errors import RequestError
from minisgl.message import TextReply, TokenLogprob
from minisgl.parsing.interface import (
    ContentText,
    ParserEvent,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from minisgl.request import FinishReason
from minisgl.server.chat.reading import ChoiceReader
from minisgl.server.errors import error_body
from minisgl.server.generation import Generation
from minisgl.server.responses.items_out import CallItem, Event, OutputItem, TextItem
from minisgl.server.responses.request import ResponsesRequest
from minisgl.server.streaming import sse_event
from minisgl.server.usage import Usage


class ResponsesAnswer:
    """The answer to one request.

    Args:
        label: the request's id.
        model: name that the client knows the model by.
        asked: the request; parts of it come back with the answer.
        reader: makes what reads the text.
    """

    def __init__(
        self,
        label: str,
        model: str,
        asked: ResponsesRequest,
        reader: Callable[[], ChoiceReader],
    ) -> None:
        self._id = f"resp_{label}"
        self._model = model
        self._asked = asked
        self._created = int(time.time())
        self._reader = reader()
        self._usage = Usage()
        self._items: list[OutputItem] = []
        self._waiting: list[TokenLogprob] = []
        self._finish_reason = ""
        self._num_events = 0

    async def collect(self, generation: Generation) -> dict[str, Any]:
        """Return the whole response.

        Raises:
            RequestError: the request was refused or failed.
        """
        async for _, reply in generation:
            self._read(reply)
        return self._response(self._status(), self._output())

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield the stream, each event under its name and numbered; a failure is its last event."""
        started = self._response("in_progress", [])
        yield self._encode(
            [
                ("response.created", {"response": started}),
                ("response.in_progress", {"response": started}),
            ]
        )
        try:
            async for replies in generation.batches():
                events = [event for _, reply in replies for event in self._read(reply)]
                if events:
                    yield self._encode(events)
        except RequestError as error:
            yield self._encode(self._failure(error))
            return
        status = self._status()
        response = self._response(status, self._output())
        end = self._items[-1].end(status) if self._items else []
        yield self._encode([*end, (f"response.{status}", {"response": response})])

    def _read(self, reply: TextReply) -> list[Event]:
        """Take a reply; return the events that it leads to."""
        self._usage.add(0, reply)
        if reply.finish_reason is not None:
            self._finish_reason = reply.finish_reason
        found = self._reader.read(reply, self._usage)
        self._waiting += reply.logprobs
        events = [event for piece in found for event in self._add(piece)]
        last = self._items[-1] if self._items else None
        if reply.finish_reason is not None and isinstance(last, TextItem):
            self._give_logprobs(last)  # of tokens without text, such as the end of sequence
        return events

    def _add(self, piece: ParserEvent) -> list[Event]:
        match piece:
            case ContentText(text=text):
                return self._more_text(text, is_reasoning=False)
            case ReasoningText(text=text):
                return self._more_text(text, is_reasoning=True)
            case ToolCallStart():
                return self._begin(CallItem(len(self._items), piece))
            case ToolCallArguments(fragment=fragment):
                return [self._items[-1].more(fragment)]

    def _more_text(self, text: str, *, is_reasoning: bool) -> list[Event]:
        events: list[Event] = []
        last = self._items[-1] if self._items else None
        if not isinstance(last, TextItem) or last.is_reasoning != is_reasoning:
            last = TextItem(len(self._items), is_reasoning=is_reasoning)
            events = self._begin(last)
        self._give_logprobs(last)
        return [*events, last.more(text)]

    def _give_logprobs(self, item: TextItem) -> None:
        """Let the log-probabilities that have come travel with the item's next text."""
        if self._waiting:
            item.take_logprobs(self._waiting)
            self._waiting = []

    def _begin(self, item: OutputItem) -> list[Event]:
        """End the item before, and begin this one."""
        before = self._items[-1].end("completed") if self._items else []
        self._items.append(item)
        return [*before, *item.begin()]

    def _output(self) -> list[dict[str, Any]]:
        """Return all items; the last one shares the response's status."""
        done = [item.item("completed") for item in self._items[:-1]]
        return [*done, *(item.item(self._status()) for item in self._items[-1:])]

    def _status(self) -> str:
        return "incomplete" if self._finish_reason == FinishReason.LENGTH else "completed"

    def _failure(self, error: RequestError) -> list[Event]:
        detail = error_body(error)["error"]
        failed = self._response("failed", [])
        failed["error"] = {
            "code": _failure_code(error.status),
            "message": detail["message"],
            "param": detail["param"],
        }
        said = {"code": detail["code"], "message": detail["message"], "param": detail["param"]}
        return [("error", said), ("response.failed", {"response": failed})]

    def _encode(self, events: Iterable[Event]) -> bytes:
        encoded = []
        for kind, fields in events:
            numbered = {"type": kind, "sequence_number": self._num_events, **fields}
            encoded.append(sse_event(numbered, kind))
            self._num_events += 1
        return b"".join(encoded)

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        asked = self._asked
        usage = self._usage
        is_cut = status == "incomplete"
        text = {"format": {"type": "text"}}
        if asked.text is not None and asked.text.format is not None:
            text["format"] = asked.text.format.model_dump(by_alias=True, exclude_none=True)
        effort = None if asked.reasoning is None else asked.reasoning.effort
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": {"effort": effort, "summary": None},
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": asked.temperature,
            "text": text,
            "tool_choice": asked.tool_choice or "auto",
            "tools": [tool.as_sent() for tool in asked.tools or ()],
            "top_logprobs": asked.top_logprobs,
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None
            if status in {"in_progress", "failed"}
            else {
                "input_tokens": usage.num_prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.num_cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.num_completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
                "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
            },
            "user": asked.user,
        }


def _failure_code(status: int) -> str:
    """Return OpenAI's word for what failed: a response knows fewer than HTTP does."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_exceeded"
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_prompt"
