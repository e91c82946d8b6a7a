"""The routes of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from fastapi import FastAPI, Request
from fastapi.responses import Response

from minisgl.server.anthropic.answer import MessagesAnswer
from minisgl.server.anthropic.request import CLIENT_NAMES, CountTokensRequest, MessagesRequest
from minisgl.server.chat.service import ChatService
from minisgl.server.middleware import name_request
from minisgl.server.respond import json_response, read_body, respond


def add_anthropic_routes(app: FastAPI, service: ChatService) -> None:
    """Add both routes to ``app``."""

    @app.post("/v1/messages")
    async def messages(request: Request) -> Response:
        asked = service.parser.parse(await read_body(request), MessagesRequest)
        label = name_request(request.scope, None)
        service.model.check_name(asked.model)
        started = service.start(asked.chat(), CLIENT_NAMES)
        answer = MessagesAnswer(label, service.model.name, started.reader)
        return await respond(request, started.generation, answer, stream=asked.stream)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        asked = service.parser.parse(await read_body(request), CountTokensRequest)
        service.model.check_name(asked.model)
        count = await service.count_tokens(request, asked.chat())
        return json_response({"input_tokens": count})
