"""Answers of ``/v1/chat/completions``, whole and as a stream."""

from dataclasses import dataclass, field
from typing import Any

from minisgl.message import PromptEcho, TextReply, TokenLogprob
from minisgl.server.openai.answer import Answer, AnswerHead
from minisgl.server.openai.chat_request import ChatRequest
from minisgl.server.openai.chunks import TextChunks
from minisgl.server.openai.logprobs import chat_logprobs, prompt_logprobs


@dataclass(slots=True)
class _Choice:
    """One answer, so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    has_begun: bool = False
    chunks: TextChunks | None = None


class ChatAnswer(Answer):
    """``/v1/chat/completions``."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, head: AnswerHead, asked: ChatRequest) -> None:
        super().__init__(head, asked)
        self._fields = asked
        self._choices = [_Choice() for _ in range(self._num_choices)]
        self._prompt: PromptEcho | None = None
        self._is_plain = not (asked.continuous_usage or asked.return_token_ids or asked.logprobs)

    def _add(self, index: int, reply: TextReply) -> None:
        choice = self._choices[index]
        self._prompt = self._prompt or reply.prompt
        choice.texts.append(reply.text)
        choice.token_ids += reply.token_ids
        choice.tokens += reply.logprobs
        if reply.finish_reason is not None:
            choice.finish_reason = reply.finish_reason

    def _whole(self) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self._choices):
            whole: dict[str, Any] = {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": "".join(choice.texts),
                    "refusal": None,
                },
                "logprobs": chat_logprobs(choice.tokens) if self._fields.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            if self._fields.return_token_ids:
                whole["token_ids"] = choice.token_ids
            choices.append(whole)
        return {"choices": choices, **self._prompt_fields()}

    def _events(self, index: int, reply: TextReply) -> list[bytes]:
        choice = self._choices[index]
        events: list[bytes] = []
        if not choice.has_begun:
            choice.has_begun = True
            more = {}
            if reply.prompt is not None and self._prompt is None:
                self._prompt = reply.prompt
                more = self._prompt_fields()
            events.append(self._chunk(_delta(index, {"role": "assistant", "content": ""}), **more))
        if reply.text or (reply.token_ids and not self._is_plain):
            events.append(self._content(index, choice, reply))
        if reply.finish_reason is not None:
            events.append(self._chunk(_delta(index, {}, finish_reason=reply.finish_reason)))
        return events

    def _content(self, index: int, choice: _Choice, reply: TextReply) -> bytes:
        """Return the chunk that carries a reply's text."""
        if self._is_plain:
            if choice.chunks is None:
                empty = _delta(index, {"content": ""})
                choice.chunks = self._encoder.around_text(empty, "delta", "content")
            return choice.chunks.encode(reply.text)
        logprobs = chat_logprobs(reply.logprobs) if self._fields.logprobs else None
        body = _delta(index, {"content": reply.text}, logprobs=logprobs)
        if self._fields.return_token_ids:
            body["token_ids"] = reply.token_ids
        return self._chunk(body)

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


def _delta(
    index: int,
    delta: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
