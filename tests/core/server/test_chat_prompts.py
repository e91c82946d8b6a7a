"""How the fields of a chat reach its template."""

from typing import Any

import pytest

from minisgl.message import TokenizeRequest
from support.http_asks import CHAT, HELLO, error_of, post, run
from support.in_process_engine import Served

OPEN: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "The answer"},
    ]
}


def sent(body: dict[str, Any]) -> TokenizeRequest:
    async def scenario(server: Served) -> TokenizeRequest:
        response = await server.http.post(CHAT, json={**body, "max_tokens": 1})
        assert response.status_code == 200, response.text
        return server.engine.requests[0]

    return run(scenario)


def test_continue_final_message_leaves_the_last_message_open() -> None:
    for extra in ({}, {"add_generation_prompt": False}):
        request = sent({**OPEN, "continue_final_message": True, **extra})
        assert request.continue_final_message
        assert not request.add_generation_prompt

    async def scenario(server: Served) -> str:
        body = {**OPEN, "continue_final_message": True}
        tokens = (await server.http.post("/tokenize", json=body)).json()["tokens"]
        return (await server.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]

    assert run(scenario).endswith("<|im_start|>assistant\nThe answer")


def test_both_a_new_turn_and_the_old_one_is_a_contradiction() -> None:
    body = {**OPEN, "continue_final_message": True, "add_generation_prompt": True}
    response = post(CHAT, body)
    assert response.status_code == 400
    assert error_of(response)["param"] == "continue_final_message"


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high", "xhigh"])
def test_reasoning_effort_is_a_variable_of_the_template(effort) -> None:
    assert sent({**HELLO, "reasoning_effort": effort}).template_kwargs == {
        "reasoning_effort": effort
    }


def test_no_reasoning_turns_off_thinking_unless_the_client_says_otherwise() -> None:
    off = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert sent({**HELLO, "reasoning_effort": "none"}).template_kwargs == off
    mine = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}
    assert sent({**HELLO, **mine}).template_kwargs == {**off, "enable_thinking": True}


def test_an_unknown_effort_is_refused_with_the_known_ones() -> None:
    error = error_of(post(CHAT, {**HELLO, "reasoning_effort": "extreme"}))
    assert error["param"] == "reasoning_effort"
    assert "'minimal', 'low', 'medium', 'high'" in error["message"]
