"""The routes of ``/v1/chat/completions`` and ``/v1/completions``."""

from fastapi import FastAPI, Request
from fastapi.responses import Response

from minisgl.request import SamplingParams
from minisgl.server.client import EngineClient
from minisgl.server.fields import RequestParser
from minisgl.server.middleware import name_request
from minisgl.server.openai.answer import AnswerHead
from minisgl.server.openai.chat_answer import ChatAnswer
from minisgl.server.openai.chat_request import ChatRequest
from minisgl.server.openai.completion_answer import CompletionAnswer
from minisgl.server.openai.completion_request import CompletionRequest
from minisgl.server.openai.fields import GenerationFields, choice_params
from minisgl.server.respond import read_body, respond
from minisgl.server.served_model import ServedModel


def add_openai_routes(
    app: FastAPI, client: EngineClient, model: ServedModel, parser: RequestParser
) -> None:
    """Add both routes to ``app``."""

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        asked = parser.parse(await read_body(request), ChatRequest)
        head = _begin(request, asked, model)
        for text in asked.texts():
            model.check_length(text, "messages")
        generation = client.generate(
            [asked.messages],
            _each(asked.sampling_params(), asked.n),
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            options=asked.template_options(),
        )
        return await respond(request, generation, ChatAnswer(head, asked), stream=asked.stream)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = parser.parse(await read_body(request), CompletionRequest)
        head = _begin(request, asked, model)
        prompts = asked.prompts()
        for prompt in prompts:
            if isinstance(prompt, str):
                model.check_length(prompt, "prompt")
        generation = client.generate(
            prompts,
            _each(asked.sampling_params(), asked.n),
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            options={"add_special_tokens": asked.add_special_tokens},
        )
        answer = CompletionAnswer(head, asked, len(prompts))
        return await respond(request, generation, answer, stream=asked.stream)


def _begin(request: Request, asked: GenerationFields, model: ServedModel) -> AnswerHead:
    """Check what concerns the request as a whole, and return what identifies its answer."""
    label = name_request(request.scope, asked.request_id)
    model.check_name(asked.model)
    asked.check_together()
    return AnswerHead(label=label, model=model.name)


def _each(params: SamplingParams, n: int) -> list[SamplingParams]:
    """Return the parameters of each of ``n`` answers."""
    return [choice_params(params, number) for number in range(n)]
