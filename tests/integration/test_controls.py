"""Penalties, biases, bans and masks: greedy tokens are those of plain loops over transformers.

Alone and mixed in one batch, whatever the schedule; log-probabilities are transformers' own.
"""

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from minisgl import LLM, SamplingParams
from minisgl.request import GrammarSpec
from support.controlled import Case, controlled_cases, judge
from support.pressure import Pressure
from support.reference import Tally
from support.replays import replay_decode_steps
from support.tiny_models import EOS_TOKEN_IDS, write_tiny_model

Site = tuple[Path, list[Case]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    path = write_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen3", "Qwen3ForCausalLM")
    return path, controlled_cases(path)


def test_each_control_changes_the_answer(site: Site) -> None:
    """Else the tests below could pass without any of them."""
    assert [case.name for case in site[1] if not case.changed] == ["none"]


def check(llm: LLM, cases: list[Case]) -> None:
    """Generate all together, some alone, and all again, and compare."""
    for some in (cases, *([case] for case in cases[::4]), cases[::-1]):
        check_some(llm, some)


def check_some(llm: LLM, cases: list[Case]) -> None:
    tally = Tally()
    results = llm.generate(
        [case.judged.prompt for case in cases], [case.params for case in cases], progress=False
    )
    for case, result in zip(cases, results, strict=True):
        tally.compare(case.judged, result.token_ids, f"{case.name} of {len(cases)}")
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


def test_a_row_forgets_what_its_last_owner_asked_for(site: Site) -> None:
    """Its next owner asks for nothing, and comes while nobody else asks for anything.

    Catches: a bias that comes to life again as soon as somebody else has one.
    """
    path, cases = site
    by_name = {case.name: case for case in cases}
    plain, last = by_name["none"], by_name["everything"]
    with LLM(str(path), progress=False, max_running_requests=2, prefix_cache="naive") as llm:
        for name in ("bias", "allowed", "presence", "bad words", "min tokens"):
            # Two rows: the second plain request follows the first one, the last one the other.
            first = replace(
                by_name[name],
                params=msgspec.structs.replace(by_name[name].params, max_tokens=3, min_tokens=0),
            )
            some = [first, plain, plain, last]
            results = llm.generate(
                [case.judged.prompt for case in some],
                [case.params for case in some],
                progress=False,
            )
            tally = Tally()
            for case, result in list(zip(some, results, strict=True))[1:]:
                tally.compare(case.judged, result.token_ids, f"{case.name} behind {name}")
            tally.check()


@pytest.mark.slow
def test_ranks_agree_on_controls(site: Site) -> None:
    """Catches: a rank that counts other tokens than the others, and so draws others."""
    path, cases = site
    with LLM(
        str(path), progress=False, tp=2, page_size=8, num_pages=30, max_prefill_tokens=40
    ) as llm:
        check(llm, cases)
        llm._session._scheduler._engine.check_alive()


def test_rows_with_a_grammar_keep_their_controls_when_they_sit_out_a_step(site: Site) -> None:
    """Catches: penalties that are gone when a row is back in the order of the decode rows."""
    path, cases = site
    plain = next(case for case in cases if case.name == "none")
    asked = SamplingParams(
        temperature=0, max_tokens=20, min_tokens=20, frequency_penalty=2, repetition_penalty=1.5
    )
    with LLM(str(path), progress=False, scheduler={"overlap": "on"}) as llm:
        vocabulary: dict[str, int] = llm.tokenizer.get_vocab()
        allowed = [token for text, token in vocabulary.items() if re.fullmatch("[a-z]+", text)]
        by_grammar = msgspec.structs.replace(asked, grammar=GrammarSpec("regex", "[a-z]*"))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        only_letters = msgspec.structs.replace(asked, allowed_token_ids=tuple(allowed))
        judged = judge(model, plain.judged.prompt, only_letters, list(EOS_TOKEN_IDS))
        llm.generate(plain.judged.prompt, by_grammar, progress=False)  # it is compiled now
        results = llm.generate(
            [plain.judged.prompt] * 2, [by_grammar, plain.params], progress=False
        )
    neutral = msgspec.structs.replace(only_letters, frequency_penalty=0, repetition_penalty=1)
    without = judge(model, plain.judged.prompt, neutral, list(EOS_TOKEN_IDS))
    assert without.tokens != judged.tokens
    tally = Tally()
    tally.compare(judged, results[0].token_ids, "grammar and penalties")
    tally.compare(plain.judged, results[1].token_ids, "beside it")
    tally.check()
