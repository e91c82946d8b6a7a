"""``POST /tokenize`` and ``/detokenize``, in vLLM's shapes."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from minisgl.errors import RequestError
from minisgl.message import DetokenizeOnly, TokenizeOnly
from minisgl.parsing.tool_choice import plan_tools
from minisgl.request import MAX_WHOLE
from minisgl.server.client import EngineClient
from minisgl.server.fields import NotOffered, RequestModel, RequestParser
from minisgl.server.respond import json_response, read_body
from minisgl.server.served_model import ServedModel
from minisgl.server.streaming import unless_disconnected


class TokenizeBody(RequestModel):
    """``POST /tokenize``: a prompt, or the messages of a chat."""

    model: str | None = None
    """Name of the model; by default, the one that is served."""
    prompt: str | None = None
    """Text."""
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    """Instead of ``prompt``: messages, as ``/v1/chat/completions`` takes them."""
    add_special_tokens: bool | None = None
    """For ``prompt``, where it is true by default: let the tokenizer add the special tokens that it
    is configured to add. A chat template writes them itself."""
    add_generation_prompt: bool = True
    """For ``messages``: end with the header of the assistant's turn."""
    continue_final_message: bool = False
    """For ``messages``: leave the last one open, so that an answer would go on with it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """For ``messages``: extra variables of the chat template."""
    tools: list[dict[str, Any]] | None = None
    """For ``messages``: functions that the template may show to the model."""

    not_offered: ClassVar[Mapping[str, NotOffered]] = {
        "return_token_strs": NotOffered("send the tokens to /detokenize", (False,)),
        "chat_template": NotOffered("a template is a program; the server uses the model's own"),
    }

    def ask(self, uid: int) -> TokenizeOnly:
        """Return the question for the tokenizer.

        Raises:
            RequestError: there is no prompt, or there are two.
        """
        prompt = self.messages if self.prompt is None else self.prompt
        if prompt is None or (self.prompt is not None and self.messages is not None):
            raise RequestError("send either prompt or messages", param="prompt")
        if self.messages is not None and self.add_special_tokens:
            raise RequestError(
                "add_special_tokens=true is for prompt; the chat template writes them itself",
                param="add_special_tokens",
            )
        return TokenizeOnly(
            uid,
            prompt,
            add_special_tokens=self.add_special_tokens is not False,
            template_kwargs=self.chat_template_kwargs or {},
            add_generation_prompt=generation_prompt(self),
            continue_final_message=self.continue_final_message,
            tools=plan_tools(self.tools).template_tools,
        )

    def check_extent(self, model: ServedModel) -> None:
        """Refuse what must be too long for the model."""
        if self.prompt is not None:
            model.check_length(self.prompt, "prompt")
        messages = self.messages or []
        others = (self.tools, self.chat_template_kwargs)
        model.check_chat(messages, message_texts(messages), others)


class DetokenizeBody(RequestModel):
    """``POST /detokenize``."""

    model: str | None = None
    """Name of the model; by default, the one that is served."""
    tokens: list[Annotated[int, Field(ge=0, le=MAX_WHOLE)]]
    """Token ids."""
    skip_special_tokens: bool = False
    """Leave special tokens out of the text."""


def message_texts(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the texts of all messages, as far as they are well-formed."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"text": content}]:
            text = part.get("text") if isinstance(part, dict) else None
            if isinstance(text, str):
                yield text


def generation_prompt(asked: Any) -> bool:
    """Return whether the prompt ends with the header of the assistant's turn.

    Args:
        asked: has ``add_generation_prompt`` and ``continue_final_message``.

    Raises:
        RequestError: both are asked for.
    """
    if not asked.continue_final_message:
        return bool(asked.add_generation_prompt)
    if asked.add_generation_prompt and "add_generation_prompt" in asked.model_fields_set:
        raise RequestError(
            "continue_final_message goes on with the last message, so add_generation_prompt, which "
            "begins a new one, must be false or absent",
            param="continue_final_message",
        )
    return False


def add_token_routes(
    app: FastAPI, client: EngineClient, model: ServedModel, parser: RequestParser
) -> None:
    """Add both routes to ``app``."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        asked = parser.parse(await read_body(request), TokenizeBody)
        model.check_name(asked.model)
        asked.check_extent(model)
        reply = await unless_disconnected(request.receive, client.tokens(asked.ask))
        return json_response(
            {
                "count": len(reply.token_ids),
                "max_model_len": model.max_seq_len,
                "tokens": reply.token_ids,
                "token_strs": None,
            }
        )

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        asked = parser.parse(await read_body(request), DetokenizeBody)
        model.check_name(asked.model)

        def ask(uid: int) -> DetokenizeOnly:
            return DetokenizeOnly(uid, asked.tokens, skip_special_tokens=asked.skip_special_tokens)

        reply = await unless_disconnected(request.receive, client.tokens(ask))
        return json_response({"prompt": reply.text})
