"""What is refused at once could never be served; everything else is."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.errors import RequestError
from minisgl.message import GenerateRequest
from minisgl.request import MAX_CACHE_SALT, MAX_PRIORITY, SamplingParams
from minisgl.scheduler.admission import validate
from support.fake_engine import FakeEngine, generate
from support.scheduling import Harness


@st.composite
def pools(draw: st.DrawFn) -> dict[str, int]:
    page_size = draw(st.sampled_from([1, 2, 3, 7, 16, 64, 256]))
    num_pages = draw(st.integers(1, 24 if page_size < 16 else 3))
    in_pool = page_size * num_pages + 1
    max_seq_len = draw(st.one_of(st.just(in_pool), st.integers(2, in_pool + 20)))
    return {"page_size": page_size, "num_pages": num_pages, "max_seq_len": max_seq_len}


@given(pools(), st.data(), st.booleans(), st.sampled_from(["radix", "naive"]))
def test_a_request_is_refused_exactly_if_the_empty_server_could_not_serve_it(
    pool: dict[str, int], data: st.DataObject, overlap: bool, cache: str
) -> None:
    """Page sizes 1 to 256, the smallest pool, right at the limit.

    Catches: limits without page rounding, one token too many or too few, an accepted request that
    waits for ever.
    """
    most = min(pool["max_seq_len"], pool["page_size"] * pool["num_pages"] + 1)
    num_prompt = max(most - data.draw(st.integers(-2, 14), label="prompt, below the limit"), 1)
    room = most - num_prompt
    max_tokens = data.draw(
        st.one_of(st.none(), st.integers(max(room - 3, 1), max(room + 2, 1))), label="max_tokens"
    )
    min_tokens = data.draw(
        st.integers(0, max(room + 2, 0) if max_tokens is None else max_tokens), label="min_tokens"
    )
    harness = Harness(**pool, rows=1, budget=5, overlap=overlap, cache=cache)  # type: ignore[arg-type]
    prompt = [place % 8 + 2 for place in range(num_prompt)]
    harness.submit(0, prompt, max_tokens=max_tokens, min_tokens=min_tokens)
    harness.finish()
    # The last token is never fed, so it needs no place in the pool.
    wanted = num_prompt + max(max_tokens or 1, min_tokens)
    fits = (
        wanted <= pool["max_seq_len"]
        and -(-(wanted - 1) // pool["page_size"]) <= (pool["num_pages"])
    )
    client = harness.clients[0]
    assert fits == (client.reasons != ["error"]), client.failures
    if fits:
        assert client.tokens == generate(prompt, max_tokens or room, min_tokens=min_tokens)
    else:
        assert str(num_prompt) in client.failures[0], "the message has the numbers"


def limits() -> FakeEngine:
    return FakeEngine(num_pages=8, page_size=4, max_seq_len=20, max_running_requests=2)


def request(**fields: object) -> GenerateRequest:
    whole = GenerateRequest(1, np.array([2, 3], dtype="<i4").tobytes(), SamplingParams())
    known = {name: getattr(whole, name) for name in whole.__struct_fields__}
    return GenerateRequest(**{**known, **fields})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", [3, 11]),
        ("logit_bias", {11: 1.0}),
        ("logit_bias", {2**31 - 1: 0.0}),
        ("bad_token_ids", [[1, 11]]),
        ("allowed_token_ids", [4, 11]),
    ],
)
def test_tokens_beyond_the_vocabulary_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} .* from 0 to 10") as caught:
        validate(request(params=SamplingParams(**{name: value})), limits().info)
    assert caught.value.param == name


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [3, 4], "logit_bias": {3: -100, 4: -100}},
        {"allowed_token_ids": [3, 4], "bad_token_ids": [[3], [5, 4]]},
        {"allowed_token_ids": [1, 4], "min_tokens": 1, "stop_token_ids": [4]},
        {"logit_bias": dict.fromkeys(range(11), -100)},
        {"logit_bias": dict.fromkeys(range(10), -100), "bad_token_ids": [[2, 10]]},
    ],
    ids=repr,
)
def test_what_may_leave_no_possible_token_is_refused(fields: dict[str, Any]) -> None:
    """Catches: the lowest token id out of nothing but banned ones."""
    with pytest.raises(RequestError, match="ban") as caught:
        validate(request(params=SamplingParams(**fields)), limits().info)
    assert caught.value.param in fields
    enough = {**fields, "logit_bias": {}, "bad_token_ids": [], "min_tokens": 0}
    validate(request(params=SamplingParams(**enough)), limits().info)


def test_bad_words_that_nobody_has_turned_into_tokens_are_refused() -> None:
    """Catches: words that may appear after all."""
    with pytest.raises(RequestError, match="tokenizer") as caught:
        validate(request(params=SamplingParams(bad_words=("x",))), limits().info)
    assert caught.value.param == "bad_words"


@pytest.mark.parametrize("salt", ["", "x" * (MAX_CACHE_SALT + 1), 5, b"x"])
def test_a_cache_salt_is_a_string_of_bounded_length(salt: object) -> None:
    with pytest.raises(RequestError, match="cache_salt must be a string of 1 to 256") as caught:
        validate(request(cache_salt=salt), limits().info)
    assert caught.value.param == "cache_salt"
    assert len(str(caught.value)) < 200
    validate(request(cache_salt="x" * MAX_CACHE_SALT), limits().info)


@pytest.mark.parametrize("priority", [MAX_PRIORITY + 1, -MAX_PRIORITY - 1, 1.5, "high", True])
def test_a_priority_is_a_whole_number_of_bounded_size(priority: object) -> None:
    with pytest.raises(RequestError, match="priority must be a whole number") as caught:
        validate(request(priority=priority), limits().info)
    assert caught.value.param == "priority"
    validate(request(priority=-MAX_PRIORITY), limits().info)


def test_the_smaller_of_pool_and_context_is_the_limit_that_the_message_names() -> None:
    info = limits().info
    long = np.full(30, 2, dtype="<i4").tobytes()
    with pytest.raises(RequestError, match="30 tokens; this server takes at most 19"):
        validate(request(token_ids=long), info)
    small = dataclasses.replace(info, num_pages=2)
    with pytest.raises(RequestError, match="30 tokens; this server takes at most 8"):
        validate(request(token_ids=long), small)
