"""Sampling parameters: what is outside its range is refused by name, with value and range."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.errors import RequestError
from minisgl.request import (
    MAX_BAD_SEQUENCES,
    MAX_BAD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    SamplingParams,
)

WRONG: list[tuple[str, list[Any]]] = [
    ("presence_penalty", [-2.01, 2.5, math.nan, math.inf, "1", True, None]),
    ("frequency_penalty", [-3, 2.0001, -math.inf, [1], False]),
    ("repetition_penalty", [0, -1, 0.009, 101, math.nan, "1", True]),
    ("logit_bias", [{1: 101}, {1: -100.5}, {-1: 0}, {"1": 1}, {1: "x"}, {1: math.nan}, [1], "x"]),
    ("logit_bias", [dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1)]),
    ("bad_words", ["", [""], [5], ["x"] * (MAX_BAD_WORDS + 1), 7]),
    ("bad_token_ids", [[[]], [5], [[-1]], [["x"]], [[1] * (MAX_BAD_TOKENS + 1)], "x", [[True]]]),
    ("bad_token_ids", [[[1]] * (MAX_BAD_SEQUENCES + 1)]),
    ("allowed_token_ids", [[], (), [-1], ["x"], [1.5], 4, {5: 1}]),
    ("logprobs", [-1, 21, True, 1.0, "2"]),
    ("prompt_logprobs", [-1, 21, False, 2.5]),
    ("return_prompt", [1, "yes", None]),
    ("stop", [5, [""], [1]]),
    ("stop_token_ids", [5, [-1], ["x"]]),
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG for value in values], ids=repr
)
def test_what_is_outside_its_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"^{name} must be ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert len(str(caught.value)) < 500, "a long value is shortened"
    assert "got" in str(caught.value)


RIGHT: dict[str, list[Any]] = {
    "presence_penalty": [-2, 2, 0.5],
    "frequency_penalty": [-2.0, 2],
    "repetition_penalty": [0.01, 100, 1],
    "logit_bias": [{}, {0: -100, 5: 100.0}, dict.fromkeys(range(MAX_LOGIT_BIAS), 0.5), None],
    "bad_words": [["x"], ("x", "y"), "x", None, ["x"] * MAX_BAD_WORDS],
    "bad_token_ids": [[[1], [2, 3]], ((1,),), None, [[1] * MAX_BAD_TOKENS] * MAX_BAD_SEQUENCES],
    "allowed_token_ids": [[0], (1, 2), None],
    "logprobs": [0, 20, None],
    "prompt_logprobs": [0, 20, None],
    "return_prompt": [True, False],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in RIGHT.items() for value in values]
)
def test_ranges_include_their_ends_and_survive_the_wire(name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert decoded == params
    if isinstance(value, list):
        assert isinstance(getattr(params, name), tuple), "immutable, as all of it is"


@given(
    st.dictionaries(
        st.sampled_from(sorted(SamplingParams.__struct_fields__)),
        st.one_of(
            st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3),
            st.lists(st.one_of(st.integers(), st.text(max_size=2), st.lists(st.integers()))),
            st.dictionaries(st.one_of(st.integers(), st.text()), st.floats()),
        ),
        max_size=4,
    )
)  # fmt: skip
def test_any_values_are_taken_or_refused_as_a_request_error(values: dict[str, Any]) -> None:
    """Catches: a type that a comparison of ranges does not take."""
    refused = None
    try:
        SamplingParams(**values)
    except RequestError as error:
        refused = error.param
    assert refused is None or refused in values
