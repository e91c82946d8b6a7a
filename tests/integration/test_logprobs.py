"""Log-probabilities are those of transformers' log-softmax, before anything changes the logits."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from minisgl import LLM, GenerationResult, SamplingParams
from minisgl.llm import TokenLogprobs
from support.pressure import Pressure
from support.replays import replay_decode_steps
from support.tiny_models import write_tiny_model

TOLERANCE = 2e-4
KINDS: list[dict[str, Any]] = [
    {"logprobs": 3},
    # Ends early, when its next token is in flight: that one is dropped from between the others.
    {"stop_token_ids": list(range(3, 250))},
    {"logprobs": 0, "temperature": 0.9},
    {"logprobs": 20, "repetition_penalty": 1.7, "frequency_penalty": 1.0},
    {"logprobs": 5, "top_k": 3, "temperature": 2.0, "allowed_token_ids": list(range(9, 90))},
    {"logprobs": 1, "prompt_logprobs": 2, "logit_bias": {7: 30.0}, "seed": 5},
    {"prompt_logprobs": 0, "temperature": 0},
    {"prompt_logprobs": 20, "logprobs": 2, "min_tokens": 4, "temperature": 0},
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", "LlamaForCausalLM")
    return path, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    shared = random.integers(3, 263, size=37).tolist()
    return [
        (shared if place % 2 else []) + random.integers(3, 263, size=1 + 6 * place).tolist()
        for place in range(len(KINDS))
    ]


def check(model: Any, prompt: list[int], params: SamplingParams, result: GenerationResult) -> None:
    """Compare every number of a result with one pass of the whole sequence."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + result.token_ids])).logits[0]
    probs = logits.double().log_softmax(dim=-1)
    if params.logprobs is None:
        assert result.logprobs is None
    else:
        assert result.logprobs is not None
        expected = probs[len(prompt) - 1 : -1]
        compare(result.token_ids, expected, result.logprobs, params.logprobs)
    if params.prompt_logprobs is None:
        assert result.prompt_logprobs is None
        assert result.prompt_token_ids is None
    else:
        assert result.num_cached_tokens == 0
        assert result.prompt_token_ids == prompt
        assert result.prompt_logprobs is not None
        assert result.prompt_logprobs[0] is None
        found = [one for one in result.prompt_logprobs if one is not None]
        assert len(found) == len(prompt) - 1
        compare(prompt[1:], probs[: len(prompt) - 1], found, params.prompt_logprobs)


def compare(
    tokens: list[int], expected: torch.Tensor, found: list[TokenLogprobs], num_top: int
) -> None:
    assert len(tokens) == len(expected) == len(found)
    for token, row, one in zip(tokens, expected, found, strict=True):
        assert one.token.token_id == token
        assert math.isclose(one.token.logprob, row[token], abs_tol=TOLERANCE)
        above = int((row > row[token] + TOLERANCE).sum())
        assert above <= one.token.rank - 1 <= int((row > row[token] - TOLERANCE).sum())
        best = row.topk(num_top)
        assert len(one.top) == num_top
        assert len({other.token_id for other in one.top}) == num_top
        for place, (other, value) in enumerate(zip(one.top, best.values.tolist(), strict=True), 1):
            assert math.isclose(other.logprob, value, abs_tol=TOLERANCE)
            assert math.isclose(row[other.token_id], value, abs_tol=TOLERANCE)
            assert other.rank == place
        assert one.token.logprob <= 0


def run(llm: LLM, model: Any, *, times: int = 2) -> None:
    for _ in range(times):  # the second time all prompts are cached
        params = [SamplingParams(max_tokens=9, **kind) for kind in KINDS]
        for prompt, one, result in zip(
            prompts(), params, llm.generate(prompts(), params, progress=False), strict=True
        ):
            check(model, prompt, one, result)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("launch", ["mixed", "split"])
def test_logprobs_are_transformers(
    site: tuple[Path, Any], page_size: int, overlap: str, launch: str
) -> None:
    path, model = site
    scheduler = {"overlap": overlap, "launch": launch}
    with LLM(str(path), progress=False, page_size=page_size, scheduler=scheduler) as llm:
        run(llm, model)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_prompts_in_chunks_under_page_pressure(
    site: tuple[Path, Any], overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a target across the border of two chunks, parts kept from a row that was lost."""
    path, model = site
    monkeypatch.setattr("minisgl.engine.logits_bound._SCORED", 263 * 11)
    monkeypatch.setattr("minisgl.engine.logits._PIECE", 263 * 3)
    with LLM(
        str(path),
        progress=False,
        page_size=4,
        num_pages=40,
        max_prefill_tokens=24,
        scheduler={"overlap": overlap},
    ) as llm:
        pressure = Pressure(llm)
        run(llm, model)
        assert pressure.num_retracted > 0


def test_recorded_decode_steps_report_the_same(
    site: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = site
    recorder = replay_decode_steps(monkeypatch, [2, 8])
    scheduler = {"overlap": "on", "launch": "split"}
    with LLM(
        str(path), progress=False, max_running_requests=8, scheduler=scheduler, page_size=16
    ) as llm:
        run(llm, model, times=1)
    assert recorder.num_replays


def test_no_step_computes_more_logits_of_prompts_than_its_bound(
    site: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: all logits of a long prompt at once."""
    monkeypatch.setattr("minisgl.engine.logits_bound._SCORED", 263 * 16)
    with LLM(str(site[0]), progress=False, page_size=4) as llm:
        model = llm._session._scheduler._engine._model  # type: ignore[attr-defined]
        forward, sizes = model.forward, []

        def watched(batch: Any) -> torch.Tensor:
            logits: torch.Tensor = forward(batch)
            sizes.append(len(logits))
            return logits

        model.forward = watched
        params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        ids = [[(7 * n + k) % 250 + 5 for n in range(100)] for k in range(2)]
        llm.generate(ids, params, progress=False)
    assert max(sizes) <= 16 + 2
    assert sum(sizes) == 2 * 100


def test_a_prompt_comes_back_as_text_and_tokens(site: tuple[Path, Any]) -> None:
    with LLM(str(site[0]), progress=False) as llm:
        params = SamplingParams(max_tokens=2, return_prompt=True)
        text = "hello <|im_end|> é日"
        (result,) = llm.generate(text, params, progress=False)
        chunks = list(llm.stream(text, params))
    assert result.prompt_token_ids is not None
    assert len(result.prompt_token_ids) == result.num_prompt_tokens
    assert result.prompt == text
    assert result.prompt_logprobs is None
    assert (chunks[0].prompt, chunks[0].prompt_token_ids) == (text, result.prompt_token_ids)
    assert all(chunk.prompt is None for chunk in chunks[1:])
