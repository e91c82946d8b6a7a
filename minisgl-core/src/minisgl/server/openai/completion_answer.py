"""Answers of ``/v1/completions``, whole and as a stream."""

from dataclasses import dataclass, field
from typing import Any

from minisgl.message import PromptEcho, TextReply, TokenLogprob
from minisgl.request import FinishReason
from minisgl.server.chunks import TextChunks
from minisgl.server.openai.answer import Answer, AnswerHead
from minisgl.server.openai.completion_request import CompletionRequest
from minisgl.server.openai.logprobs import (
    CompletionLogprobs,
    cut_to,
    joined,
    prompt_logprobs,
)
from minisgl.server.usage import Usage


@dataclass(slots=True)
class _Choice:
    """One answer to one prompt, so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    tokens: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: str = ""
    has_begun: bool = False
    offsets: CompletionLogprobs = field(default_factory=CompletionLogprobs)
    chunks: TextChunks | None = None


class CompletionAnswer(Answer):
    """``/v1/completions``."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, head: AnswerHead, asked: CompletionRequest, num_prompts: int) -> None:
        super().__init__(head, asked, num_prompts)
        self._fields = asked
        self._usage = Usage(asked.n, counts_output=not asked.only_echo)
        self._choices = [_Choice() for _ in range(self._num_choices)]
        self._prompts: list[PromptEcho | None] = [None] * num_prompts
        self._is_plain = not (
            asked.continuous_usage or asked.return_token_ids or asked.logprobs is not None
        )

    def _add(self, index: int, reply: TextReply) -> None:
        choice = self._choices[index]
        self._keep_prompt(index, reply)
        if not self._fields.only_echo:
            choice.texts.append(reply.text)
            choice.token_ids += reply.token_ids
            choice.tokens += reply.logprobs
        if reply.finish_reason is not None:
            choice.finish_reason = self._reason(reply.finish_reason)

    def _whole(self) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self._choices):
            prompt = self._prompt_of(index)
            text = "".join(choice.texts)
            whole: dict[str, Any] = {
                "index": index,
                "text": prompt.text + text if self._fields.echo and prompt else text,
                "logprobs": self._logprobs(choice, prompt, choice.tokens),
                "finish_reason": choice.finish_reason,
                **self._prompt_fields(prompt),
            }
            if self._fields.return_token_ids:
                whole["token_ids"] = choice.token_ids
            choices.append(whole)
        return {"choices": choices}

    def _events(self, index: int, reply: TextReply) -> list[bytes]:
        choice = self._choices[index]
        self._keep_prompt(index, reply)
        events: list[bytes] = []
        if not choice.has_begun:
            choice.has_begun = True
            if opening := self._opening(index, choice):
                events.append(self._chunk(opening))
        if not self._fields.only_echo and (reply.text or (reply.token_ids and not self._is_plain)):
            events.append(self._content(index, choice, reply))
        if reply.finish_reason is not None:
            reason = self._reason(reply.finish_reason)
            events.append(self._chunk(_chunk_choice(index, "", finish_reason=reason)))
        return events

    def _opening(self, index: int, choice: _Choice) -> dict[str, Any] | None:
        """Return the choice of a chunk about the prompt, where the request asks about it."""
        prompt = self._prompt_of(index)
        fields = self._prompt_fields(prompt)
        if prompt is None or not (fields or self._fields.echo):
            return None
        text = prompt.text if self._fields.echo else ""
        logprobs = self._logprobs(choice, prompt, []) if self._fields.echo else None
        if self._fields.only_echo and self._fields.return_token_ids:
            fields["token_ids"] = []  # no chunk with content follows
        return {**_chunk_choice(index, text, logprobs=logprobs), **fields}

    def _content(self, index: int, choice: _Choice, reply: TextReply) -> bytes:
        """Return the chunk that carries a reply's text."""
        if self._is_plain:
            if choice.chunks is None:
                choice.chunks = self._encoder.around_text(_chunk_choice(index, ""), "text")
            return choice.chunks.encode(reply.text)
        logprobs = self._logprobs(choice, None, list(reply.logprobs))
        body = _chunk_choice(index, reply.text, logprobs=logprobs)
        if self._fields.return_token_ids:
            body["token_ids"] = reply.token_ids
        return self._chunk(body)

    def _keep_prompt(self, index: int, reply: TextReply) -> None:
        if reply.prompt is not None and self._prompts[index // self._fields.n] is None:
            self._prompts[index // self._fields.n] = reply.prompt

    def _prompt_of(self, index: int) -> PromptEcho | None:
        return self._prompts[index // self._fields.n]

    def _prompt_fields(self, prompt: PromptEcho | None) -> dict[str, Any]:
        """Return what the request wants to know about its prompt, in vLLM's fields."""
        fields: dict[str, Any] = {}
        if prompt is None:
            return fields
        if self._fields.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(prompt, self._fields.prompt_logprobs)
        if self._fields.return_token_ids:
            fields["prompt_token_ids"] = prompt.token_ids
        return fields

    def _logprobs(
        self,
        choice: _Choice,
        prompt: PromptEcho | None,
        tokens: list[TokenLogprob | None],
    ) -> dict[str, Any] | None:
        """Return ``logprobs`` of the next tokens, behind those of the prompt if it is given."""
        num_top = self._fields.logprobs
        if num_top is None:
            return None
        if prompt is None or not self._fields.echo:
            return choice.offsets.piece(tokens)
        echoed = choice.offsets.piece(cut_to(prompt.logprobs, num_top), prompt)
        return joined([echoed, choice.offsets.piece(tokens)])

    def _reason(self, reason: str) -> str:
        return str(FinishReason.LENGTH) if self._fields.only_echo else reason


def _chunk_choice(
    index: int,
    text: str,
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
