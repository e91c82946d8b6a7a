"""Answers of ``/v1/chat/completions``, whole and as a stream."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minisgl.message import PromptEcho, TextReply, TokenLogprob
from minisgl.parsing.interface import (
    ContentText,
    ParserEvent,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from minisgl.server.chat.reading import ChoiceReader, ReadAnswer
from minisgl.server.chunks import TextChunks
from minisgl.server.openai.answer import Answer, AnswerHead
from minisgl.server.openai.chat_request import ChatRequest
from minisgl.server.openai.logprobs import chat_logprobs, prompt_logprobs


@dataclass(slots=True)
class _Choice:
    """One answer, so far."""

    reader: ChoiceReader
    answer: ReadAnswer = field(default_factory=ReadAnswer)
    token_ids: list[int] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    has_begun: bool = False
    chunks: TextChunks | None = None


class ChatAnswer(Answer):
    """``/v1/chat/completions``.

    Args:
        head: identifies it.
        asked: the request.
        reader: makes what reads the text of one answer.
    """

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(
        self,
        head: AnswerHead,
        asked: ChatRequest,
        reader: Callable[[], ChoiceReader] = ChoiceReader,
    ) -> None:
        super().__init__(head, asked)
        self._fields = asked
        self._choices = [_Choice(reader()) for _ in range(self._num_choices)]
        self._prompt: PromptEcho | None = None
        self._sends_more = asked.continuous_usage or asked.return_token_ids or asked.logprobs

    def _add(self, index: int, reply: TextReply) -> None:
        choice = self._choices[index]
        self._prompt = self._prompt or reply.prompt
        choice.answer.add(choice.reader.read(reply, self._usage))
        choice.token_ids += reply.token_ids
        choice.tokens += reply.logprobs
        if reply.finish_reason is not None:
            choice.finish_reason = choice.reader.reason(reply.finish_reason)

    def _whole(self) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self._choices):
            whole: dict[str, Any] = {
                "index": index,
                "message": choice.answer.message(),
                "logprobs": chat_logprobs(choice.tokens) if self._fields.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            if self._fields.return_token_ids:
                whole["token_ids"] = choice.token_ids
            choices.append(whole)
        return {"choices": choices, **self._prompt_fields()}

    def _events(self, index: int, reply: TextReply) -> list[bytes]:
        choice = self._choices[index]
        chunks: list[bytes] = []
        if not choice.has_begun:
            choice.has_begun = True
            more = {}
            if reply.prompt is not None and self._prompt is None:
                self._prompt = reply.prompt
                more = self._prompt_fields()
            chunks.append(self._chunk(_delta(index, {"role": "assistant", "content": ""}), **more))
        chunks += self._content(index, choice, reply)
        if reply.finish_reason is not None:
            reason = choice.reader.reason(reply.finish_reason)
            chunks.append(self._chunk(_delta(index, {}, finish_reason=reason)))
        return chunks

    def _content(self, index: int, choice: _Choice, reply: TextReply) -> list[bytes]:
        """Return the chunks that carry what a reply adds to the answer."""
        events = choice.reader.read(reply, self._usage)
        if not self._sends_more:
            return [
                self._text_chunk(index, choice, event.text)
                if isinstance(event, ContentText)
                else self._chunk(_delta(index, _delta_of(event)))
                for event in events
            ]
        if not reply.token_ids and not events:
            return []
        # Tokens travel with the first piece that they lead to, or alone while text is held back.
        deltas = [_delta_of(event) for event in events] or [{}]
        first, *others = [_delta(index, delta) for delta in deltas]
        if self._fields.logprobs:
            first["logprobs"] = chat_logprobs(reply.logprobs)
        if self._fields.return_token_ids:
            first["token_ids"] = reply.token_ids
        return [self._chunk(choice) for choice in (first, *others)]

    def _text_chunk(self, index: int, choice: _Choice, text: str) -> bytes:
        if choice.chunks is None:
            empty = _delta(index, {"content": ""})
            choice.chunks = self._encoder.around_text(empty, "delta", "content")
        return choice.chunks.encode(text)

    def _prompt_fields(self) -> dict[str, Any]:
        """Return what the request wants to know about its prompt, in vLLM's fields."""
        fields: dict[str, Any] = {}
        if self._prompt is None:
            return fields
        if self._fields.prompt_logprobs is not None:
            num_top = self._fields.prompt_logprobs
            fields["prompt_logprobs"] = prompt_logprobs(self._prompt, num_top)
        if self._fields.return_token_ids:
            fields["prompt_token_ids"] = self._prompt.token_ids
        return fields


def _delta_of(event: ParserEvent) -> dict[str, Any]:
    """Return what an event adds to the assistant's turn."""
    match event:
        case ContentText(text=text):
            return {"content": text}
        case ReasoningText(text=text):
            return {"reasoning_content": text, "reasoning": text}
        case ToolCallStart(index=number, id=call_id, name=name):
            function = {"name": name, "arguments": ""}
            call = {"index": number, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case ToolCallArguments(index=number, fragment=fragment):
            return {"tool_calls": [{"index": number, "function": {"arguments": fragment}}]}


def _delta(
    index: int,
    delta: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
