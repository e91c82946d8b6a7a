"""The workers' handling of one request: a refusal or a crash is a reply, never an exception."""

import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl.message import (
    AbortRequest,
    DetokenizeOnly,
    ErrorReply,
    GenerateRequest,
    StreamStart,
    TokenBatch,
    TokenizeOnly,
    TokenizeRequest,
    TokensReply,
)
from minisgl.request import SamplingParams
from minisgl.tokenizer.answers import answer
from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.encoding import PromptEncoder
from minisgl.tokenizer.worker import _detokenize
from support.text_tokenizers import byte_level, sentencepiece, write_byte_level

PARAMS = SamplingParams(max_tokens=3)
ENCODER = PromptEncoder(byte_level())


def test_a_prompt_becomes_a_request_for_the_scheduler() -> None:
    reply = answer(ENCODER, TokenizeRequest(7, "hello", PARAMS, 2, "tenant"))
    assert isinstance(reply, GenerateRequest)
    assert reply.cache_salt == "tenant"
    assert (reply.uid, reply.params, reply.priority) == (7, PARAMS, 2)
    assert reply.prompt.dtype == np.int32
    assert reply.prompt.tolist() == ENCODER.encode("hello")


@pytest.mark.parametrize("prompt", ["", [], [-1], [{"role": "user"}], [{}]])
def test_a_bad_prompt_becomes_an_error_reply(prompt) -> None:
    reply = answer(ENCODER, TokenizeRequest(7, prompt, PARAMS))
    assert isinstance(reply, ErrorReply)
    assert (reply.uid, reply.status) == (7, 400)
    assert reply.param is not None


def test_a_crash_of_the_tokenizer_is_that_requests_error(monkeypatch, caplog) -> None:
    encoder = PromptEncoder(byte_level())
    monkeypatch.setattr(encoder, "encode_texts", lambda *a, **k: 1 / 0)
    reply = answer(encoder, TokenizeRequest(7, "x", PARAMS))
    assert isinstance(reply, ErrorReply)
    assert reply.status == 500
    assert "division" not in reply.message
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


def test_tokens_alone_go_back_to_the_api_server() -> None:
    reply = answer(ENCODER, TokenizeOnly(7, "hello"))
    assert reply == TokensReply(7, ENCODER.encode("hello"))
    messages = [{"role": "user", "content": "hello"}]
    assert answer(ENCODER, TokenizeOnly(7, messages)) == TokensReply(7, ENCODER.encode(messages))


def test_text_of_tokens_goes_back_to_the_api_server() -> None:
    ids = [1, *ENCODER.encode("hello"), 2]
    assert answer(ENCODER, DetokenizeOnly(7, ids)) == TokensReply(
        7, text="<|im_start|>hello<|im_end|>"
    )
    assert answer(ENCODER, DetokenizeOnly(7, ids, True)) == TokensReply(7, text="hello")


@pytest.mark.parametrize("bad", [-1, 10**6, 2**40])
def test_tokens_that_do_not_exist_are_refused_by_value(bad) -> None:
    reply = answer(ENCODER, DetokenizeOnly(7, [5, bad]))
    assert isinstance(reply, ErrorReply)
    assert (reply.status, reply.param) == (400, "tokens")
    assert str(bad) in reply.message


def test_bad_words_are_forbidden_alone_and_behind_a_space() -> None:
    params = SamplingParams(bad_words=("world", " hello"), bad_token_ids=((5,),))
    reply = answer(ENCODER, TokenizeRequest(7, "x", params))
    assert isinstance(reply, GenerateRequest)
    expected = [ENCODER.encode(text) for text in ("world", " world", "hello")]  # " hello" ends so
    assert [list(ids) for ids in reply.params.bad_token_ids] == [[5], *expected]


def test_a_sequence_that_ends_with_a_forbidden_one_is_not_named_again() -> None:
    encoder = PromptEncoder(sentencepiece())  # " x" is a space and then "x"
    params = encoder.with_bad_token_ids(SamplingParams(bad_words=("Hello", "Hello")))
    assert [encoder.decode(ids) for ids in params.bad_token_ids] == ["Hello"]


@pytest.mark.parametrize("word", [" ", "\ud800"])
def test_a_bad_word_without_tokens_is_refused(word) -> None:
    reply = answer(ENCODER, TokenizeRequest(7, "x", SamplingParams(bad_words=(word,))))
    assert isinstance(reply, ErrorReply)
    assert (reply.status, reply.param) == (400, "bad_words")


def test_the_prompts_end_comes_only_if_it_is_asked_for() -> None:
    messages = [{"role": "user", "content": "x"}]
    asked = answer(ENCODER, TokenizeRequest(7, messages, PARAMS, return_prompt_tail=True))
    assert isinstance(asked, GenerateRequest)
    assert asked.prompt_tail == "<|im_start|>assistant\n"
    silent = answer(ENCODER, TokenizeRequest(7, messages, PARAMS))
    assert isinstance(silent, GenerateRequest)
    assert silent.prompt_tail == ""
    assert silent.token_ids == asked.token_ids


def test_a_tokenizer_process_does_without_torch(tmp_path) -> None:
    write_byte_level(tmp_path)
    code = """
        import sys
        from types import SimpleNamespace
        from minisgl.tokenizer import worker

        def serve(tokenizer, addresses, status):
            ids = tokenizer.apply_chat_template([{"role": "user", "content": "x"}])["input_ids"]
            print(len(ids), sys.modules["torch"])

        worker.serve_tokenizer = serve
        model = SimpleNamespace(tokenizer=None, path=sys.argv[1])
        status = SimpleNamespace(starting=lambda stage: None)
        worker.tokenizer_main(SimpleNamespace(model=model), None, status)
        """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert int(done.stdout.split()[0]) > 3
    assert done.stdout.split()[1] == "None"
