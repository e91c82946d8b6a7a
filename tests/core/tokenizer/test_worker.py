"""The workers' handling of one request: a refusal or a crash is a reply, never an exception."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl.message import (
    AbortRequest,
    ErrorReply,
    GenerateRequest,
    StreamStart,
    TokenBatch,
    TokenizeRequest,
)
from minisgl.request import SamplingParams
from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.encoding import PromptEncoder
from minisgl.tokenizer.worker import _detokenize, tokenize
from support.text_tokenizers import byte_level

PARAMS = SamplingParams(max_tokens=3)
ENCODER = PromptEncoder(byte_level())


def test_a_prompt_becomes_a_request_for_the_scheduler() -> None:
    answer = tokenize(ENCODER, TokenizeRequest(7, "hello", PARAMS, 2, "tenant"))
    assert isinstance(answer, GenerateRequest)
    assert answer.cache_salt == "tenant"
    assert (answer.uid, answer.params, answer.priority) == (7, PARAMS, 2)
    assert answer.prompt.dtype == np.int32
    assert answer.prompt.tolist() == ENCODER.encode("hello")


@pytest.mark.parametrize("prompt", ["", [], [-1], [{"role": "user"}], [{}]])
def test_a_bad_prompt_becomes_an_error_reply(prompt) -> None:
    answer = tokenize(ENCODER, TokenizeRequest(7, prompt, PARAMS))
    assert isinstance(answer, ErrorReply)
    assert (answer.uid, answer.status) == (7, 400)
    assert answer.param is not None


def test_a_crash_of_the_tokenizer_is_that_requests_error(monkeypatch, caplog) -> None:
    encoder = PromptEncoder(byte_level())
    monkeypatch.setattr(encoder, "encode", lambda *a, **k: 1 / 0)
    answer = tokenize(encoder, TokenizeRequest(7, "x", PARAMS))
    assert isinstance(answer, ErrorReply)
    assert answer.status == 500
    assert "division" not in answer.message
    assert "ZeroDivisionError" in caplog.text


class Outbox:
    """A socket that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_a_step_that_cannot_be_read_ends_its_requests_instead_of_leaving_them_waiting() -> None:
    wires: Any = SimpleNamespace(frontend=Outbox(), scheduler=Outbox())
    batch = TokenBatch(
        started=[StreamStart(3, 1, PARAMS)],
        uids=np.array([3, 4], dtype="<i8").tobytes(),
        token_ids=b"\0\0\0\0",  # one token for two requests
        finished_uids=[5],
        finish_reasons=["stop"],
        num_cached_tokens=[0],
        failures=[None],
    )
    _detokenize(Detokenizer(byte_level()), batch, wires)
    assert [(reply.uid, reply.status) for reply in wires.frontend.sent] == [
        (3, 500),
        (4, 500),
        (5, 500),
    ]
    assert wires.scheduler.sent == [AbortRequest([3, 4, 5])]
