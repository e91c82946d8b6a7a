"""``/tokenize`` and ``/detokenize``."""

from typing import Any

import httpx
import pytest

from support.fake_scheduler import MAX_SEQ_LEN
from support.http_asks import CHAT, HELLO, error_of, post, run
from support.in_process_engine import MODEL, Served
from support.text_tokenizers import byte_level, sentencepiece


def test_a_prompt_is_tokenised_as_the_engine_would() -> None:
    text = "hello wörld 😀"
    body = post("/tokenize", {"prompt": text, "model": MODEL}).json()
    expected = byte_level()(text)["input_ids"]
    assert body == {
        "count": len(expected),
        "max_model_len": MAX_SEQ_LEN,
        "tokens": expected,
        "token_strs": None,
    }


def test_messages_are_tokenised_as_a_chat_would_be() -> None:
    usage = post(CHAT, {**HELLO, "max_tokens": 1}).json()["usage"]
    body = post("/tokenize", HELLO).json()
    assert body["count"] == usage["prompt_tokens"]
    without = post("/tokenize", {**HELLO, "add_generation_prompt": False}).json()
    assert body["tokens"][: without["count"]] == without["tokens"]
    assert without["count"] < body["count"]


def test_text_comes_back_from_its_tokens() -> None:
    text = "hello wörld 😀"
    tokens = post("/tokenize", {"prompt": text}).json()["tokens"]
    assert post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}
    special = {"tokens": [*tokens, 2]}
    assert post("/detokenize", special).json() == {"prompt": f"{text}<|im_end|>"}
    assert post("/detokenize", {**special, "skip_special_tokens": True}).json()["prompt"] == text
    assert post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_an_empty_text_has_no_tokens_but_those_that_the_tokenizer_adds() -> None:
    assert post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    with_bos = post("/tokenize", {"prompt": ""}, tokenizer=sentencepiece(add_bos=True)).json()
    assert (with_bos["count"], with_bos["tokens"]) == (1, [1])
    body = {"prompt": "", "add_special_tokens": False}
    assert post("/tokenize", body, tokenizer=sentencepiece(add_bos=True)).json()["tokens"] == []
    empty = {"messages": [{"role": "user", "content": ""}]}
    assert (
        post("/tokenize", empty, chat_template="{{ messages[0]['content'] }}").json()["count"] == 0
    )


def test_what_is_empty_is_called_so() -> None:
    for body, said in (
        ({"messages": []}, "messages: must not be empty, got []"),
        (
            {"messages": [{"role": "user", "content": []}]},
            "messages[0].content must hold at least one text part, got []; an empty text is ''",
        ),
    ):
        assert error_of(post(CHAT, body))["message"] == said
    assert error_of(post("/v1/completions", {"prompt": ""}))["message"] == "the prompt is empty"


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", **HELLO}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("/tokenize", {**HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"prompt": "x" * 10**6}, "prompt"),
        (
            "/tokenize",
            {**HELLO, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_a_400_that_names_the_field(route, body, param) -> None:
    async def scenario(server: Served) -> tuple[httpx.Response, httpx.Response]:
        bad = await server.http.post(route, json=body)
        return bad, await server.http.post("/tokenize", json={"prompt": "x"})

    bad, next_one = run(scenario)
    assert bad.status_code == 400
    assert error_of(bad)["param"] == param
    assert next_one.json()["count"] == 1


def test_another_models_name_is_a_404() -> None:
    for route, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        assert post(route, {**body, "model": "other"}).status_code == 404


def test_a_server_that_fails_answers_who_waits_for_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(server: Served) -> Any:
        import asyncio

        from minisgl.errors import RequestError

        monkeypatch.setattr(server.engine, "send", lambda message: None)  # nobody answers
        task = asyncio.create_task(server.http.post("/tokenize", json={"prompt": "x"}))
        while not server.client._questions:
            await asyncio.sleep(0)
        server.client.fail_all(RequestError("the tokenizer process died", status=500))
        return await task

    response = run(scenario)
    assert response.status_code == 500
    assert error_of(response)["message"] == "the tokenizer process died"
