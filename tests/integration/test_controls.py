"""Penalties, biases, bans and masks: greedy tokens are those of plain loops over transformers.

Alone and mixed in one batch, whatever the schedule; log-probabilities are transformers' own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from minisgl import LLM, SamplingParams
from support.controlled import Judged, judge
from support.pressure import Pressure
from support.reference import Tally
from support.replays import replay_decode_steps
from support.tiny_models import EOS_TOKEN_IDS, write_tiny_model

MAX_TOKENS = 24
VOCAB = 263


def asked_for(plain: list[int]) -> dict[str, dict[str, Any]]:
    """Return what to ask for, made for an answer that would be ``plain``: so that it matters."""
    return {
        "none": {},
        "presence": {"presence_penalty": 1.7},
        "frequency": {"frequency_penalty": 0.9},
        "negative": {"frequency_penalty": -1.5, "presence_penalty": -2},
        "repetition": {"repetition_penalty": 2.5},
        "all penalties": {
            "repetition_penalty": 0.6,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
        },
        "bias": {"logit_bias": {token: 2.0 + token % 7 for token in range(20, 60)}},
        "ban by bias": {"logit_bias": dict.fromkeys(plain[2:5], -100)},
        "allowed": {"allowed_token_ids": list(range(3, 40))},
        "bad words": {"bad_token_ids": [(plain[1],), (plain[2], plain[3]), tuple(plain[4:7])]},
        "min tokens": {"ignore_eos": False, "min_tokens": 12, "stop_token_ids": plain[3:5]},
        "everything": {
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.4,
            "logit_bias": {7: 3.0, plain[6]: -100, plain[0]: 5.0},
            "allowed_token_ids": list(range(5, 261)),
            "bad_token_ids": [(plain[1],), (plain[2], plain[3]), (plain[0], plain[0])],
            "ignore_eos": False,
            "min_tokens": 5,
            "stop_token_ids": (plain[0],),
        },
    }


NAMES = list(asked_for([0] * MAX_TOKENS))


def prompts() -> list[list[int]]:
    """One for each of ``NAMES``; some begin alike, longer than a page."""
    random = np.random.default_rng(5)
    shared = random.integers(3, VOCAB, size=40).tolist()
    return [
        (shared if place % 3 == 0 else []) + random.integers(3, VOCAB, size=3 + 5 * place).tolist()
        for place in range(len(NAMES))
    ]


@dataclass
class Case:
    """A prompt, what is asked of it, and the judge's answer."""

    name: str
    params: SamplingParams
    judged: Judged
    changed: bool


Site = tuple[Path, list[Case]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    path = write_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen3", "Qwen3ForCausalLM")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    cases = []
    for name, prompt in zip(NAMES, prompts(), strict=True):
        greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        plain = judge(model, prompt, greedy, []).tokens
        params = msgspec.structs.replace(greedy, **asked_for(plain)[name])
        judged = judge(model, prompt, params, list(EOS_TOKEN_IDS))
        cases.append(Case(name, params, judged, plain[: len(judged.tokens)] != judged.tokens))
    return path, cases


def test_each_control_changes_the_answer(site: Site) -> None:
    """Else the tests below could pass without any of them."""
    assert [case.name for case in site[1] if not case.changed] == ["none"]


def check(llm: LLM, cases: list[Case], **more: Any) -> None:
    """Generate all together, some alone, and all again, and compare."""
    tally = Tally()
    for some in (cases, *([case] for case in cases[::4]), cases[::-1]):
        results = llm.generate(
            [case.judged.prompt for case in some],
            [msgspec.structs.replace(case.params, **more) for case in some],
            progress=False,
        )
        for case, result in zip(some, results, strict=True):
            tally.compare(case.judged, result.token_ids, f"{case.name} of {len(some)}")
    tally.check()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("launch", ["mixed", "split"])
def test_greedy_tokens_with_controls_are_the_judges(
    site: Site, page_size: int, overlap: str, launch: str
) -> None:
    """Catches: counts that lack the token in flight, or the prompt that the cache supplied."""
    path, cases = site
    scheduler = {"overlap": overlap, "launch": launch}
    with LLM(str(path), progress=False, page_size=page_size, scheduler=scheduler) as llm:
        check(llm, cases)


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 175), (16, 14)])
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_controls_survive_chunks_retraction_and_other_owners_of_the_row(
    site: Site, page_size: int, num_pages: int, overlap: str
) -> None:
    """Catches: counts that begin anew, twice or late when a request gets its next row."""
    path, cases = site
    with LLM(
        str(path),
        progress=False,
        page_size=page_size,
        num_pages=num_pages,
        max_running_requests=7,
        max_prefill_tokens=32,
        scheduler={"overlap": overlap},
    ) as llm:
        pressure = Pressure(llm)
        check(llm, cases)
        assert pressure.num_retracted > 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_controls_with_recorded_decode_steps(
    site: Site, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: rows that keep the token that the graph drew, or count it beside their own."""
    path, cases = site
    recorder = replay_decode_steps(monkeypatch, [1, 4, 16])
    scheduler = {"overlap": "on", "launch": "split"}
    with LLM(
        str(path), progress=False, page_size=page_size, max_running_requests=16, scheduler=scheduler
    ) as llm:
        check(llm, cases)
    assert recorder.num_replays
