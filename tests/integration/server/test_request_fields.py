"""Request fields against a real (tiny) model: what they ask for happens, streamed and not."""

import json
import re
import sys
from typing import Any

import httpx
import pytest

from support import server_process
from support.http_asks import CHAT, TEXT, whole_of
from support.server_process import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the supervisor's tests need Linux"),
]

PROMPT = [(7 * k) % 250 + 5 for k in range(40)]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


@pytest.fixture
def url(tiny_url: str) -> str:
    return tiny_url


def post(url: str, route: str, body: dict[str, Any]) -> httpx.Response:
    return server_process.post(f"{url}{route}", json=body)


def complete(url: str, **fields: Any) -> dict[str, Any]:
    """The whole answer to a greedy request, after comparing it with the stream."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, **fields}
    response = post(url, TEXT, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    stream = post(url, TEXT, {**body, "stream": True})
    events = [json.loads(block[6:]) for block in stream.text.strip().split("\n\n")[:-1]]
    assert whole_of(TEXT, events) == {
        choice["index"]: (choice["text"], choice["finish_reason"]) for choice in answer["choices"]
    }
    return answer


def first(url: str, **fields: Any) -> dict[str, Any]:
    choice: dict[str, Any] = complete(url, **fields)["choices"][0]
    return choice


def greedy_ids(url: str, **fields: Any) -> list[int]:
    ids: list[int] = first(url, return_token_ids=True, **fields)["token_ids"]
    return ids


def test_token_ids_are_those_of_prompt_and_text(url: str) -> None:
    choice = first(url, return_token_ids=True, skip_special_tokens=False, ignore_eos=True)
    assert choice["prompt_token_ids"] == PROMPT
    assert len(choice["token_ids"]) == 12
    body = {"tokens": choice["token_ids"]}
    text = post(url, "/detokenize", body).json()["prompt"]
    assert text == choice["text"]


def test_a_biased_token_is_taken_and_a_banned_one_is_not(url: str) -> None:
    greedy = greedy_ids(url, max_tokens=1)
    banned = greedy_ids(url, max_tokens=1, logit_bias={str(greedy[0]): -100})
    assert banned != greedy
    wanted = 97 if greedy[0] != 97 else 98
    assert greedy_ids(url, max_tokens=3, logit_bias={str(wanted): 100}) == [wanted] * 3


def test_only_allowed_tokens_appear(url: str) -> None:
    allowed = [60, 70, 80]
    assert set(greedy_ids(url, allowed_token_ids=allowed)) <= set(allowed)


def test_a_bad_word_does_not_appear(url: str) -> None:
    text = first(url, allowed_token_ids=list(range(68, 94)), max_tokens=20)["text"]
    word = text[3:5]
    without = first(url, allowed_token_ids=list(range(68, 94)), max_tokens=20, bad_words=[word])[
        "text"
    ]
    assert word in text
    assert word not in without


@pytest.mark.parametrize(
    "penalty",
    [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 100.0}],
    ids=str,
)
def test_penalties_lessen_repetition(url: str, penalty: dict[str, float]) -> None:
    fields = {"allowed_token_ids": [60, 70, 80, 90], "max_tokens": 24, "logit_bias": {"60": 1}}
    plain, penalised = greedy_ids(url, **fields), greedy_ids(url, **fields, **penalty)
    assert len(set(penalised)) >= len(set(plain))
    assert penalised != plain


def test_a_greedy_token_is_the_likeliest_and_values_are_the_models_own(url: str) -> None:
    fields = {"logprobs": 3, "max_tokens": 6, "skip_special_tokens": False, "ignore_eos": True}
    plain = first(url, **fields)["logprobs"]
    for token, value, top in zip(
        plain["tokens"], plain["token_logprobs"], plain["top_logprobs"], strict=True
    ):
        assert value == max(top.values()) == top[token] < 0
    hot = first(url, **{**fields, "temperature": 3.0, "seed": 1, "max_tokens": 1})["logprobs"]
    assert hot["top_logprobs"][0].items() >= plain["top_logprobs"][0].items()


def test_an_echoed_prompt_has_the_values_that_generation_had(url: str) -> None:
    fields = {"logprobs": 1, "skip_special_tokens": False, "ignore_eos": True, "max_tokens": 5}
    answer = first(url, **fields, return_token_ids=True)
    whole = PROMPT + answer["token_ids"]
    echoed = first(url, prompt=whole, echo=True, max_tokens=0, logprobs=1)
    assert echoed["logprobs"]["token_logprobs"][0] is None
    assert len(echoed["logprobs"]["tokens"]) == len(whole)
    assert echoed["logprobs"]["token_logprobs"][-5:] == pytest.approx(
        answer["logprobs"]["token_logprobs"], abs=1e-3
    )


def test_prompt_logprobs_are_there_though_the_prompt_is_cached(url: str) -> None:
    for _ in range(2):
        found = first(url, prompt_logprobs=1, max_tokens=1)["prompt_logprobs"]
        assert found[0] is None
        assert len(found) == len(PROMPT)
        assert all(str(token) in entry for token, entry in zip(PROMPT[1:], found[1:], strict=True))


@pytest.mark.parametrize("seed", [5, -5, -(2**63)])
def test_seeded_choices_differ_and_come_back(url: str, seed: int) -> None:
    fields = {"n": 3, "seed": seed, "temperature": 1.5, "max_tokens": 10}
    texts = [choice["text"] for choice in complete(url, **fields)["choices"]]
    assert len(set(texts)) == 3
    assert texts == [choice["text"] for choice in complete(url, **fields)["choices"]]
    assert texts[0] == first(url, **{**fields, "n": 1})["text"]


def test_the_prompt_of_n_choices_is_computed_once(url: str) -> None:
    def computed() -> float:
        text = server_process.get(f"{url}/metrics").text
        found = {
            name: float(re.search(rf"minisgl:{name}\{{[^}}]*\}} (\S+)", text).group(1))
            for name in ("prefix_cache_queries_total", "prefix_cache_hits_total")
        }
        return found["prefix_cache_queries_total"] - found["prefix_cache_hits_total"]

    def compute(num_tokens: int, seed: int, **fields: object) -> None:
        prompt = [(seed * k) % 250 + 5 for k in range(num_tokens)]
        assert post(url, TEXT, {"prompt": prompt, "max_tokens": 3, **fields}).status_code == 200

    # The counts come with heartbeats: behind the next two, those of earlier tests are there.
    def wait_for_heartbeat(seed: int) -> None:
        earlier = computed()
        compute(8, seed)
        wait_for(lambda: computed() > earlier, "a heartbeat")

    wait_for_heartbeat(3)
    wait_for_heartbeat(4)
    before = computed()
    compute(160, 11, n=4, temperature=1)
    # The counts come with heartbeats: where those of this are, those of all before it are, too.
    compute(80, 17)
    wait_for(lambda: computed() - before >= 160 + 80, "the counts")
    assert computed() - before < 2 * 160 + 80


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"response_format": {"type": "json_object"}}, None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            SCHEMA,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, SCHEMA),
        ({"json_schema": SCHEMA}, SCHEMA),
        ({"regex": "(ab|cd){2}x"}, r"(ab|cd){2}x"),
        ({"structured_outputs": {"regex": "[0-9]{4}"}}, r"[0-9]{4}"),
        ({"guided_regex": "[0-9]{4}"}, r"[0-9]{4}"),
        ({"guided_choice": ["yes", "no"]}, r"yes|no"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, r"red|green"),
        ({"ebnf": 'root ::= "a" | "bc"'}, r"a|bc"),
        ({"guided_grammar": 'root ::= "x" [0-9]'}, r"x[0-9]"),
    ],
    ids=str,
)
def test_text_has_the_form_that_was_asked_for(url: str, fields: dict[str, Any], check: Any) -> None:
    pytest.importorskip("xgrammar")
    choice = first(url, max_tokens=100, temperature=0.8, seed=3, **fields)
    if isinstance(check, str):
        assert re.fullmatch(check, choice["text"])
        assert choice["finish_reason"] == "stop"
    elif choice["finish_reason"] == "stop":
        value = json.loads(choice["text"])
        assert isinstance(value, dict)
        if check is not None:
            assert set(value) == {"name", "old"}
            assert value["name"] in {"Ada", "Bob"}
    else:
        assert check is None  # a random model may write strings without end


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "sound"}},
                }
            },
            "response_format",
        ),
        ({"regex": "(("}, "regex"),
        ({"ebnf": "root ="}, "ebnf"),
        ({"structured_outputs": {"json": {"type": 5}}}, "structured_outputs"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_cannot_be_compiled_is_a_400_that_names_its_field(
    url: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    pytest.importorskip("xgrammar")
    response = post(url, TEXT, {"prompt": PROMPT, "max_tokens": 5, "stream": stream, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert first(url, max_tokens=2)["finish_reason"] == "length"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "meet"}}])
def test_a_demanded_tool_is_called_with_arguments_of_its_schema(url: str, choice: Any) -> None:
    pytest.importorskip("xgrammar")
    tool = {"type": "function", "function": {"name": "meet", "parameters": SCHEMA}}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [tool],
        "tool_choice": choice,
        "max_tokens": 200,
        "seed": 2,
        "parallel_tool_calls": False,
    }
    response = post(url, CHAT, body)
    assert response.status_code == 200, response.text
    [one] = response.json()["choices"]
    [call] = one["message"]["tool_calls"]
    assert one["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "meet"
    assert set(json.loads(call["function"]["arguments"])) == {"name", "old"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_tools_schema_that_cannot_be_compiled_is_named_in_each_protocol(
    url: str, stream: bool
) -> None:
    pytest.importorskip("xgrammar")
    good: dict[str, Any] = {"type": "object"}
    bad: dict[str, Any] = {"type": "object", "properties": {"a": {"not": {}}}}
    chat: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in (("f", good), ("g", bad))
    ]
    messages = [{"role": "user", "content": "x"}]
    named = {"type": "function", "function": {"name": "g"}}
    asks: list[tuple[str, dict[str, Any], str]] = [
        (CHAT, {"messages": messages, "tools": chat, "tool_choice": "required"},
         "tools[1].function.parameters"),
        (CHAT, {"messages": messages, "tools": chat, "tool_choice": named},
         "tools[1].function.parameters"),
        ("/v1/responses", {"input": "x", "tool_choice": "required",
                           "tools": [{"type": "function", **one["function"]} for one in chat]},
         "tools[1].parameters"),
        ("/v1/messages", {"messages": messages, "max_tokens": 5, "tool_choice": {"type": "any"},
                          "tools": [{"name": "f", "input_schema": good},
                                    {"name": "g", "input_schema": bad}]},
         "tools[1].input_schema"),
    ]  # fmt: skip
    for route, fields, param in asks:
        response = post(url, route, {**fields, "stream": stream})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error.get("param", param) == param
        assert error["message"] == (
            f"{param} (json_schema) is not accepted: #/properties/a has 'not', which is not "
            "supported"
        )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"99999999": 5}}, "logit_bias"),
        ({"allowed_token_ids": [99999999]}, "allowed_token_ids"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"prompt": [5, 10**6]}, "prompt"),
    ],
)
def test_what_the_model_cannot_do_is_a_400_that_names_the_field(
    url: str, fields: dict[str, Any], param: str
) -> None:
    response = post(url, TEXT, {"prompt": PROMPT, "max_tokens": 5, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_chat_and_the_other_protocols_name_their_own_limits(url: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    for route, body, param in (
        (CHAT, {"messages": messages, "max_completion_tokens": 10**6}, "max_completion_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 1600}]}, "messages"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 10**6}, "max_output_tokens"),
        ("/v1/responses", {"input": "x" * 1600}, "input"),
    ):
        response = post(url, route, body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
