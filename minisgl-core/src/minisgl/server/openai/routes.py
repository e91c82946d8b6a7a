"""The routes of ``/v1/chat/completions`` and ``/v1/completions``."""

from fastapi import FastAPI, Request
from fastapi.responses import Response

from minisgl.server.chat.service import ChatService
from minisgl.server.middleware import name_request
from minisgl.server.openai.answer import AnswerHead
from minisgl.server.openai.chat_answer import ChatAnswer
from minisgl.server.openai.chat_request import ChatRequest
from minisgl.server.openai.completion_answer import CompletionAnswer
from minisgl.server.openai.completion_request import CompletionRequest
from minisgl.server.openai.fields import GenerationFields, choice_params
from minisgl.server.respond import read_body, respond


def add_openai_routes(app: FastAPI, service: ChatService) -> None:
    """Add both routes to ``app``."""
    client, model = service.client, service.model

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        asked = service.parser.parse(await read_body(request), ChatRequest)
        head = _head(request, asked, service)
        started = service.start(asked)
        answer = ChatAnswer(head, asked, started.reader)
        return await respond(request, started.generation, answer, stream=asked.stream)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = service.parser.parse(await read_body(request), CompletionRequest)
        head = _head(request, asked, service)
        asked.check_together()
        prompts = asked.prompts()
        for prompt in prompts:
            if isinstance(prompt, str):
                model.check_length(prompt, "prompt")
        params = asked.sampling_params()
        generation = client.generate(
            prompts,
            [choice_params(params, number) for number in range(asked.n)],
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            timeout=asked.timeout,
            options={"add_special_tokens": asked.add_special_tokens},
            names=asked.engine_names(),
        )
        answer = CompletionAnswer(head, asked, len(prompts))
        return await respond(request, generation, answer, stream=asked.stream)


def _head(request: Request, asked: GenerationFields, service: ChatService) -> AnswerHead:
    """Return what identifies the answer, once the request is known to be for this model."""
    label = name_request(request.scope, asked.request_id)
    service.model.check_name(asked.model)
    return AnswerHead(label=label, model=service.model.name)
