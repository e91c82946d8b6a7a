"""The published workload, to the token; and the flags that describe another one."""

import dataclasses
import random

import pytest

from minisgl.benchmark.workload import PRESETS, Workload
from minisgl.cli import main

OFFLINE = PRESETS["minisgl-offline"].workload


@pytest.mark.parametrize(
    ("seed", "num_in", "num_out"),
    [(0, 142_827, 133_966), (1, 149_935, 156_222), (2, 147_434, 140_460)],
)
def test_the_published_workload_has_the_published_numbers_of_tokens(seed, num_in, num_out):
    """Catches: any other order of the draws; all systems were measured on seeds 1 and 2."""
    prompts, params = OFFLINE.requests(seed)
    assert sum(map(len, prompts)) == num_in
    assert sum(one.max_tokens or 0 for one in params) == num_out
    assert {(one.temperature, one.ignore_eos) for one in params} == {(0.6, True)}


def test_the_draws_are_those_of_pythons_own_generator():
    random.seed(5)
    lengths, prompts = [], []
    for _ in range(3):
        lengths.append(random.randint(2, 9))
        prompts.append([random.randint(0, 30) for _ in range(lengths[-1])])
    answers = [random.randint(1, 4) for _ in range(3)]
    workload = Workload(num_prompts=3, input_len=(2, 9), output_len=(1, 4), max_token_id=30)
    found, params = workload.requests(5)
    assert found == prompts
    assert [one.max_tokens for one in params] == answers


def test_a_single_request_has_512_tokens_in_and_out():
    prompts, params = PRESETS["one-request"].workload.requests(1)
    assert [len(prompt) for prompt in prompts] == [512]
    assert [one.max_tokens for one in params] == [512]


def test_a_shared_prefix_comes_before_prompts_that_are_drawn_as_ever():
    plain = Workload(num_prompts=3, input_len=(2, 9), output_len=(1, 4), max_token_id=30)
    shared = dataclasses.replace(plain, shared_prefix_len=5)
    (prompts, params), (longer, same) = plain.requests(5), shared.requests(5)
    assert [one[5:] for one in longer] == prompts
    assert same == params
    assert len({tuple(one[:5]) for one in longer}) == 1
    assert shared.requests(6)[0][0][:5] != longer[0][:5], "a round has a prefix of its own"


def test_presets_limit_requests_as_published():
    for name in ("minisgl-offline", "one-request"):
        preset = PRESETS[name]
        limits = {"model.max_seq_len": 4096, "scheduler.max_running_requests": 256}
        assert limits.items() <= preset.settings.items()
        assert preset.settings.keys() - limits.keys() <= {"scheduler.policy", "cache.page_size"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--preset", "minisgl-offline", "--num-prompts", "3"], "leave out --num-prompts"),
        (["--preset", "minisgl-ofline"], "invalid choice"),
        (["--seeds", "1"], "at least two seeds"),
        (["--seeds", "0,1,1"], "only once"),
        (["--input-len", "9:3"], "from the smaller to the larger"),
        (["--output-len", "0"], "argument --output-len: a number of at least 1"),
        (["--num-prompts", "\u00b2"], "argument --num-prompts: a number of at least 1"),
        (["--temperature", "-1"], "--temperature must be from 0 to 100, got -1"),
        (["--model", "m", "--json", "/no/such/folder/x.json"], "in a folder that exists"),
        ([], "type --model"),
    ],
)
def test_a_wrong_workload_is_refused_before_anything_is_loaded(flags, message, capsys):
    assert main(["bench", "offline", *flags]) == 2
    assert message in capsys.readouterr().err
