"""The route of ``/v1/responses``."""

from fastapi import FastAPI, Request
from fastapi.responses import Response

from minisgl.server.chat.service import ChatService
from minisgl.server.middleware import name_request
from minisgl.server.respond import read_body, respond
from minisgl.server.responses.answer import ResponsesAnswer
from minisgl.server.responses.request import CLIENT_NAMES, ResponsesRequest


def add_responses_routes(app: FastAPI, service: ChatService) -> None:
    """Add the route to ``app``."""

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        asked = service.parser.parse(await read_body(request), ResponsesRequest)
        label = name_request(request.scope, None)
        service.model.check_name(asked.model)
        started = service.start(asked.chat(), CLIENT_NAMES)
        answer = ResponsesAnswer(label, service.model.name, asked, started.reader)
        return await respond(request, started.generation, answer, stream=asked.stream)
