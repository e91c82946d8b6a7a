"""Small inputs from public bug reports of such servers, each with the right behaviour.

The numbers are those of the collection that the project keeps of them. Those about processes,
start-up and plugins are in ``test_lifecycle``, ``test_silence`` and the tests of the plugin host;
here are those about requests. Each answer is asked for whole and as a stream, and both must agree.
"""

import itertools
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl import LLM, SamplingParams
from support import server_process
from support.http_asks import CHAT, TEXT, text_of, whole_of
from support.patience import PATIENCE
from support.server_process import wait_for
from support.tiny_serving import SECOND_EOS, TINY_PAGES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the supervisor's tests need Linux"),
]

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
IDS = [(13 * k) % 250 + 5 for k in range(64)]


def post(url: str, route: str, body: Any) -> httpx.Response:
    return server_process.post(f"{url}{route}", content=json.dumps(body))


def events(url: str, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """R100: every event is one line of data and a blank line; the last one is ``[DONE]``."""
    response = post(url, route, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.content.decode("utf-8").endswith("data: [DONE]\n\n")
    blocks = response.text.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block[6:]) for block in blocks[:-1]]


def ask(url: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer, asked for beside the stream, which must say the same."""
    with ThreadPoolExecutor(2) as threads:
        whole = threads.submit(post, url, route, body)
        streamed = threads.submit(events, url, route, body)
        response = whole.result()
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        found = whole_of(route, streamed.result())
    if body.get("temperature") == 0 or "seed" in body:
        assert found == {
            choice["index"]: (text_of(route, choice), choice["finish_reason"])
            for choice in answer["choices"]
        }
    return answer


def first(url: str, route: str = TEXT, **body: Any) -> dict[str, Any]:
    choice: dict[str, Any] = ask(url, route, {"temperature": 0, **body})["choices"][0]
    return choice


def refused(url: str, route: str, body: Any) -> dict[str, Any]:
    """The error of a request that is refused, streamed or not; the next one is served."""
    bodies = [body, {**body, "stream": True}] if isinstance(body, dict) else [body]
    for one in bodies:
        response = post(url, route, one)
        assert 400 <= response.status_code < 500, response.text
        error: dict[str, Any] = response.json()["error"]
        assert {"message", "type", "param", "code"} <= set(error)
    assert post(url, TEXT, {"prompt": "x", "max_tokens": 1}).status_code == 200
    return error


# Refusals

REFUSED: list[tuple[str, str, Any, str]] = [
    ("R14", TEXT, {"prompt": "Hello", "stop": "", "max_tokens": 8}, "stop"),
    ("R31", TEXT, {"prompt": [], "max_tokens": 2}, "prompt"),
    ("R33", TEXT, {"prompt": [5] * 5000, "max_tokens": 1}, "5000"),
    ("R37", TEXT, {"prompt": "Hello", "max_tokens": 0}, "max_tokens"),
    ("R37", TEXT, {"prompt": "Hello", "max_tokens": -1}, "max_tokens"),
    ("R38", TEXT, {"prompt": "Hello", "max_tokens": 1000000}, "1000000"),
    ("R40", TEXT, [1, 2, 3], "body"),
    ("R40", CHAT, None, "body"),
    ("R40", TEXT, 5, "body"),
    ("R40", CHAT, "x", "body"),
    ("R42", TEXT, {"prompt": "Hello", "max_tokens": 2, "logit_bias": {"99999999": 5}}, "99999999"),
    ("R43", TEXT, {"prompt": [5, 1000000], "max_tokens": 2}, "1000000"),
    ("R45", TEXT, {"prompt": "Hello", "max_tokens": 2, "temperature": -1}, "temperature"),
    ("R45", TEXT, {"prompt": "Hello", "max_tokens": 2, "top_p": 1.5}, "top_p"),
    ("R45", TEXT, {"prompt": "Hello", "max_tokens": 2, "n": 0}, "n"),
    ("R45", TEXT, {"prompt": "Hello", "max_tokens": 2, "n": 1000000}, "n"),
    ("R45", TEXT, {"prompt": "Hello", "max_tokens": 2, "presence_penalty": 50}, "presence_penalty"),
    ("R47", TEXT, {"model": "no-such-model", "prompt": "x"}, "no-such-model"),
    ("R48", CHAT, {"messages": [{"role": "user"}]}, "content"),
    ("R48", CHAT, {"messages": []}, "messages"),
    ("R48", CHAT, {"messages": None}, "messages"),
    ("R48", CHAT, {"messages": [{}]}, "role"),
    ("R48", CHAT, {"messages": [{"content": "x"}]}, "role"),
    ("R48", CHAT, {"messages": [{"role": "user", "content": 5}]}, "content"),
    ("R51", CHAT, {**HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("R92", CHAT, {**HELLO, "response_format": {"type": "sound"}}, "sound"),
    (
        "R98",
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "image",
    ),
]


@pytest.mark.parametrize(
    ("route", "body", "word"),
    [case[1:] for case in REFUSED],
    ids=[f"{case[0]}-{place}" for place, case in enumerate(REFUSED)],
)
def test_a_request_that_cannot_be_served_is_refused(tiny_url, route, body, word) -> None:
    assert word in refused(tiny_url, route, body)["message"]


def test_r27_stream_options_without_a_stream_are_refused(tiny_url) -> None:
    body = {"prompt": "Hello", "stream": False, "stream_options": {"include_usage": True}}
    response = post(tiny_url, TEXT, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"


def test_r40_a_body_that_is_no_json_is_refused(tiny_url) -> None:
    response = server_process.post(f"{tiny_url}{TEXT}", content=b'{"prompt": ')
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


def test_r47_another_models_name_is_not_found(tiny_url) -> None:
    assert post(tiny_url, TEXT, {"model": "no-such-model", "prompt": "x"}).status_code == 404


def test_r30_an_empty_prompt_is_no_crash(tiny_url) -> None:
    for stream in (False, True):
        body = {"prompt": "", "max_tokens": 2, "stream": stream}
        assert post(tiny_url, TEXT, body).status_code in {200, 400}
    assert first(tiny_url, prompt="x", max_tokens=1)


# Ends, counts and events


def test_r17_a_stop_string_or_a_list_is_not_part_of_the_text(tiny_url) -> None:
    free = first(tiny_url, prompt=IDS, max_tokens=16, allowed_token_ids=list(range(68, 94)))["text"]
    stop = free[4]
    for given in (stop, [stop], ["zz", stop, "yy"]):
        choice = first(
            tiny_url, prompt=IDS, max_tokens=16, allowed_token_ids=list(range(68, 94)), stop=given
        )
        assert choice["text"] == free[: free.index(stop)]
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_r19_r25_the_reason_is_length_at_the_limit_and_null_before_it(tiny_url, route) -> None:
    base: dict[str, Any] = HELLO if route == CHAT else {"prompt": "Hello"}
    body = {**base, "max_tokens": 5, "ignore_eos": True, "temperature": 0}
    assert ask(tiny_url, route, body)["choices"][0]["finish_reason"] == "length"
    reasons = [event["choices"][0]["finish_reason"] for event in events(tiny_url, route, body)]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_r20_r21_r23_r103_usage_counts_tokens_in_one_last_chunk(tiny_url, route) -> None:
    base: dict[str, Any] = HELLO if route == CHAT else {"prompt": "Hello"}
    body = {**base, "max_tokens": 7, "temperature": 0, "ignore_eos": True}
    usage = ask(tiny_url, route, body)["usage"]
    assert usage["completion_tokens"] == 7
    *chunks, last = events(tiny_url, route, {**body, "stream_options": {"include_usage": True}})
    kind = "chat.completion.chunk" if route == CHAT else "text_completion"
    assert {chunk["object"] for chunk in [*chunks, last]} == {kind}
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (
        usage["prompt_tokens"],
        7,
    )


@pytest.mark.parametrize("extra", [{}, {"max_tokens": None}])
def test_r39_a_chat_needs_no_limit(tiny_url, extra) -> None:
    for stream in (False, True):
        body = {**HELLO, **extra, "stream": stream, "logit_bias": {"2": 100}}
        assert post(tiny_url, CHAT, body).status_code == 200


def test_r07_hot_sampling_gives_valid_utf8_and_json(tiny_url) -> None:
    for seed in range(5):
        body = {"prompt": "Hello", "max_tokens": 40, "temperature": 2.0, "seed": seed}
        ask(tiny_url, TEXT, body)


@pytest.mark.parametrize("token", [2, SECOND_EOS])
def test_r97_either_of_two_end_tokens_ends_the_text(tiny_url, token) -> None:
    choice = first(tiny_url, prompt=IDS, max_tokens=9, logit_bias={str(token): 100})
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    on = first(tiny_url, prompt=IDS, max_tokens=9, logit_bias={str(token): 100}, ignore_eos=True)
    assert on["finish_reason"] == "length"


def test_r98_text_parts_count_like_the_plain_string(tiny_url) -> None:
    plain = ask(
        tiny_url, CHAT, {"messages": [{"role": "user", "content": "Hello world"}], "max_tokens": 1}
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello world"}]}]
    found = ask(tiny_url, CHAT, {"messages": parts, "max_tokens": 1})
    assert found["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


# Log-probabilities, echo, choices, bias, forms


def test_r80_each_place_has_its_own_alternatives(tiny_url) -> None:
    body = {**HELLO, "max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    content = ask(tiny_url, CHAT, {**body, "ignore_eos": True})["choices"][0]["logprobs"]["content"]
    tops = [tuple(top["logprob"] for top in entry["top_logprobs"]) for entry in content]
    assert len(tops) == 5
    assert len(set(tops)) > 1
    for entry, top in zip(content, tops, strict=True):
        assert list(top) == sorted(top, reverse=True)
        assert entry["logprob"] == top[0]


def test_r83_no_alternatives_still_means_values(tiny_url) -> None:
    found = first(tiny_url, prompt="Hello", max_tokens=2, logprobs=0, ignore_eos=True)["logprobs"]
    assert len(found["token_logprobs"]) == 2
    assert all(value <= 0 for value in found["token_logprobs"])


def test_r84_echo_without_generation_is_the_prompt(tiny_url) -> None:
    answer = ask(
        tiny_url, TEXT, {"prompt": "Hello there", "max_tokens": 0, "echo": True, "temperature": 0}
    )
    assert answer["choices"][0]["text"] == "Hello there"
    assert answer["usage"]["completion_tokens"] == 0


def test_r86_three_choices_have_indexes_0_to_2(tiny_url) -> None:
    body = {"prompt": "Hello", "n": 3, "max_tokens": 6, "temperature": 1, "seed": 1}
    assert [choice["index"] for choice in ask(tiny_url, TEXT, body)["choices"]] == [0, 1, 2]


def test_r87_a_banned_token_gives_way_to_another(tiny_url) -> None:
    fields: dict[str, Any] = {
        "prompt": IDS,
        "max_tokens": 1,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    [greedy] = first(tiny_url, **fields)["token_ids"]
    [other] = first(tiny_url, **fields, logit_bias={str(greedy): -100})["token_ids"]
    assert other != greedy


def test_r88_json_that_was_asked_for_is_enforced(tiny_url) -> None:
    pytest.importorskip("xgrammar")
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}
    choice = first(tiny_url, CHAT, **HELLO, response_format=form, max_tokens=40)
    assert json.loads(choice["message"]["content"]) == {}


# The same tokens, whatever else happens


def test_r68_r72_a_cached_prompt_gives_the_same_answer(tiny_url) -> None:
    for ids in (IDS, IDS[:48], IDS[:16]):
        fields: dict[str, Any] = {"prompt": ids, "max_tokens": 24, "return_token_ids": True}
        answers = [first(tiny_url, **fields)["token_ids"] for _ in range(2)]
        cold = first(tiny_url, **fields, cache_salt=f"cold {len(ids)}")["token_ids"]
        assert answers == [cold, cold]


def test_r73_r74_r76_answers_do_not_depend_on_the_batch_or_the_chunks(
    tiny_url: str, tiny_model: Path
) -> None:
    prompts = [[(3 * n + 5 * k) % 250 + 5 for k in range(1 + 13 * n)] for n in range(16)]
    with LLM(str(tiny_model), progress=False, max_prefill_tokens=4096) as llm:
        results = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=16), progress=False
        )
    expected = [result.token_ids for result in results]
    found: dict[int, list[int]] = {}

    def work(n: int) -> None:
        body = {"prompt": prompts[n], "temperature": 0, "max_tokens": 16, "return_token_ids": True}
        found[n] = post(tiny_url, TEXT, body).json()["choices"][0]["token_ids"]

    def noise(n: int) -> None:
        post(tiny_url, TEXT, {"prompt": prompts[n], "temperature": 1.5, "max_tokens": 16})

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    threads += [threading.Thread(target=noise, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(16)] == expected


def test_r61_r64_dropped_streams_stop_at_once_and_give_everything_back(tiny_url) -> None:
    def drop() -> None:
        body = {"prompt": "Tell a story", "max_tokens": 400, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{tiny_url}{TEXT}", json=body, timeout=PATIENCE) as response:
            next(response.iter_bytes(), None)

    threads = [threading.Thread(target=drop) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def idle() -> bool:
        load = server_process.get(f"{tiny_url}/health").json()
        counts = (load["num_running"], load["num_waiting"], load["num_free_pages"])
        return counts == (0, 0, TINY_PAGES)

    wait_for(idle, "all pages to come back")


# Text of the demo model

SPANISH = {"messages": [{"role": "user", "content": "Say hello in Spanish."}], "temperature": 0}


def test_r01_no_delta_but_the_last_holds_half_a_character(demo_url) -> None:
    whole = ask(demo_url, CHAT, {**SPANISH, "max_tokens": 40})["choices"][0]["message"]["content"]
    assert any(ord(character) > 0xFFFF for character in whole)
    deltas = [
        event["choices"][0]["delta"].get("content", "")
        for event in events(demo_url, CHAT, {**SPANISH, "max_tokens": 40})
    ]
    assert "".join(deltas) == whole
    texts = [delta for delta in deltas if delta]
    assert not any("\ufffd" in delta for delta in texts[:-1])


def test_r02_a_shorter_answer_is_a_prefix_of_a_longer_one(demo_url) -> None:
    def said(limit: int) -> str:
        return whole_of(CHAT, events(demo_url, CHAT, {**SPANISH, "max_tokens": limit}))[0][0]

    with ThreadPoolExecutor(16) as threads:
        texts = list(threads.map(said, range(1, 17)))
    for shorter, longer in itertools.pairwise(texts):
        assert longer.startswith(shorter.rstrip("\ufffd"))


def test_r08_spaces_between_words_survive_the_stream(demo_url) -> None:
    text = first(demo_url, prompt="the quick brown fox", max_tokens=16)["text"]
    assert len(text.split()) > 8
    assert "  " not in text.strip()


def test_r10_r11_a_stop_of_several_tokens_is_cut_exactly(demo_url) -> None:
    prompt = "Here is the English alphabet: ABC"
    free = first(demo_url, prompt=prompt, max_tokens=16)["text"]
    ids = first(demo_url, prompt=prompt, max_tokens=16, return_token_ids=True)["token_ids"]
    words = [
        post(demo_url, "/detokenize", {"tokens": [token]}).json()["prompt"] for token in ids[2:4]
    ]
    across = words[0][-1:] + words[1][:1]
    for stop in ("DEFGHIJ", across, free[3:14]):
        choice = first(demo_url, prompt=prompt, max_tokens=16, stop=[stop])
        if stop in free:
            assert choice["text"] == free[: free.index(stop)]
            assert choice["finish_reason"] == "stop"
        else:
            assert choice["text"] == free


def test_r16_a_stop_of_several_tokens_fires_in_a_chat_too(demo_url) -> None:
    messages = [{"role": "user", "content": "Repeat exactly: alpha beta gamma delta"}]
    chat = {"messages": messages, "temperature": 0, "max_tokens": 12}
    said = ask(demo_url, CHAT, chat)["choices"][0]["message"]["content"]
    stop = " ".join(said.split()[1:3])
    cut = ask(demo_url, CHAT, {**chat, "stop": [stop]})["choices"][0]
    assert cut["message"]["content"] == said[: said.index(stop)]
    assert cut["finish_reason"] == "stop"


def test_r95_the_prompt_has_no_second_beginning(demo_url) -> None:
    usage = ask(demo_url, CHAT, {**HELLO, "max_tokens": 1})["usage"]
    tokens = post(demo_url, "/tokenize", HELLO).json()["tokens"]
    assert usage["prompt_tokens"] == len(tokens)
    text = post(demo_url, "/detokenize", {"tokens": tokens}).json()["prompt"]
    assert text.count("<|im_start|>") == text.count("<|im_end|>") + 1
    assert not text.startswith("<|im_start|><|im_start|>")


def test_the_demo_model_answers_in_sensible_english(demo_url) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 32}
    [choice] = ask(demo_url, CHAT, body)["choices"]
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert choice["finish_reason"] == "stop"
