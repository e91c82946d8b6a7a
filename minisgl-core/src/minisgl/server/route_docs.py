"""What ``/openapi.json`` says about each route of this server."""

from collections.abc import Sequence
from typing import Final

from minisgl.server.answer_models import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    DetokenizeAnswer,
    ErrorBody,
    Health,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    Version,
)
from minisgl.server.anthropic.answer_models import Message, MessageStreamEvent, TokenCount
from minisgl.server.anthropic.request import CountTokensRequest, MessagesRequest
from minisgl.server.openai.chat_request import ChatRequest
from minisgl.server.openai.completion_request import CompletionRequest
from minisgl.server.openapi import RouteDoc
from minisgl.server.responses.answer_models import ResponseObject, ResponseStreamEvent
from minisgl.server.responses.request import ResponsesRequest
from minisgl.server.tokens import DetokenizeBody, TokenizeBody

ROUTE_DOCS: Final[Sequence[RouteDoc]] = (
    RouteDoc(
        path="/v1/chat/completions",
        summary="Answer a chat, as OpenAI's API does.",
        body=ChatRequest,
        answer=ChatCompletion,
        events=(ChatCompletionChunk, ErrorBody),
        ends_with_done=True,
    ),
    RouteDoc(
        path="/v1/completions",
        summary="Go on with a text, as OpenAI's API does.",
        body=CompletionRequest,
        answer=Completion,
        events=(Completion, ErrorBody),
        ends_with_done=True,
    ),
    RouteDoc(
        path="/v1/responses",
        summary="Answer a chat, as OpenAI's Responses API does, without keeping it.",
        body=ResponsesRequest,
        answer=ResponseObject,
        events=(ResponseStreamEvent,),
    ),
    RouteDoc(
        path="/v1/messages",
        summary="Answer a chat, as Anthropic's API does.",
        body=MessagesRequest,
        answer=Message,
        events=(MessageStreamEvent,),
    ),
    RouteDoc(
        path="/v1/messages/count_tokens",
        summary="Count the tokens of a chat, as Anthropic's API does.",
        body=CountTokensRequest,
        answer=TokenCount,
    ),
    RouteDoc(
        path="/tokenize",
        summary="Return the tokens of a text or a chat.",
        body=TokenizeBody,
        answer=TokenizeAnswer,
    ),
    RouteDoc(
        path="/detokenize",
        summary="Return the text of tokens.",
        body=DetokenizeBody,
        answer=DetokenizeAnswer,
    ),
    RouteDoc(
        path="/v1/models",
        method="get",
        summary="List the served model.",
        answer=ModelList,
        errors=(401,),
    ),
    RouteDoc(
        path="/v1/models/{name}",
        method="get",
        summary="Describe the served model.",
        answer=ModelCard,
        errors=(401, 404),
    ),
    RouteDoc(
        path="/health",
        method="get",
        summary="Say whether the engine answers.",
        answer=Health,
        errors=(503,),
    ),
    RouteDoc(
        path="/version",
        method="get",
        summary="Return the server's version.",
        answer=Version,
        errors=(401,),
    ),
    RouteDoc(
        path="/metrics",
        method="get",
        summary="Return what Prometheus collects.",
        content_type="text/plain",
        errors=(401,),
    ),
)
