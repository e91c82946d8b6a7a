"""Models that transformers' own code computes, over our scheduler, cache and attention.

Greedy output is token for token that of transformers' ``generate``, as for the plugin's models in
``test_exactness.py``.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from minisgl import LLM, SamplingParams
from minisgl.errors import ModelLoadError, RequestError, SettingsError
from minisgl.plugins.model_selection import FASTER_ELSEWHERE
from support.pressure import Pressure
from support.reference import Reference, Tally, greedy
from support.tiny_models import (
    ARCHITECTURES,
    EOS_TOKEN_IDS,
    UNOFFERED_ARCHITECTURES,
    write_tiny_model,
)

MAX_TOKENS = 16
LENGTHS = (1, 15, 16, 33, 64, 65, 100, 130)
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module", params=[*ARCHITECTURES, *UNOFFERED_ARCHITECTURES])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Reference]]:
    """A tiny checkpoint, and transformers' continuations of prompts with a shared beginning."""
    path = write_tiny_model(tmp_path_factory.mktemp("tiny") / request.param, request.param)
    random = np.random.default_rng(11)
    shared = random.integers(3, 263, size=40).tolist()
    prompts = [
        (shared[: length - 1] + random.integers(3, 263, size=length).tolist())[:length]
        for length in LENGTHS
    ]
    judge = load_judge(path)
    references = greedy(judge, prompts, MAX_TOKENS, EOS_TOKEN_IDS)
    assert min(len(set(one.tokens)) for one in references[-3:]) > 2, "nothing to get wrong"
    return path, references


def load_judge(path: Path) -> Any:
    """Not transformers' default attention: with some versions it leaves out soft caps."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )


def open_llm(path: Path, **settings: Any) -> LLM:
    """Our own architectures have a plugin here: they must be told to do without."""
    offered = path.name in ARCHITECTURES
    implementation = "transformers" if offered else "auto"
    return LLM(str(path), progress=False, model_implementation=implementation, **settings)


def compare(llm: LLM, references: list[Reference], what: str) -> int:
    """Generate all at once, one by one, and all at once again; returns how much was cached."""
    tally, num_cached = Tally(), 0
    for batch in (references, *([one] for one in references[:3]), references):
        results = llm.generate([one.prompt for one in batch], GREEDY, progress=False)
        for reference, result in zip(batch, results, strict=True):
            tally.compare(reference, result.token_ids, what)
            num_cached += result.num_cached_tokens
    tally.check()
    return num_cached


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 1, "max_prefill_tokens": 7, "scheduler": {"overlap": "on"}},
        {"page_size": 16, "max_prefill_tokens": 50, "scheduler": {"launch": "split"}},
        {"page_size": 64, "scheduler": {"launch": "mixed"}, "prefix_cache": "naive"},
    ],
    ids=["page 1, chunks of 7", "page 16, chunks of 50", "page 64, nothing cached"],
)
def test_greedy_tokens_are_those_of_transformers(
    model: tuple[Path, list[Reference]], settings: dict[str, Any]
) -> None:
    path, references = model
    with open_llm(path, **settings) as llm:
        num_cached = compare(llm, references, f"{path.name} {settings}")
    assert (num_cached == 0) == (settings.get("prefix_cache") == "naive")


def test_page_pressure_leaves_no_trace(model: tuple[Path, list[Reference]]) -> None:
    path, references = model
    with open_llm(path, page_size=16, num_pages=14, max_prefill_tokens=64) as llm:
        pressure = Pressure(llm)
        compare(llm, references, f"{path.name} under pressure")
        assert pressure.num_evicted > 0
        assert pressure.num_retracted > 0


@pytest.mark.parametrize("model", ARCHITECTURES, indirect=True)
def test_the_plugin_says_the_same(model: tuple[Path, list[Reference]]) -> None:
    path, references = model
    with LLM(str(path), progress=False, model_implementation="plugin") as llm:
        compare(llm, references, path.name)


def test_two_engines_in_one_process(tmp_path: Path) -> None:
    """Both keep the batch in flight of their own model, and K and V in their own pool."""
    paths = [
        write_tiny_model(tmp_path / name, name, seed=seed)
        for seed, name in enumerate(("Gemma2ForCausalLM", "Olmo2ForCausalLM"))
    ]
    prompts = [list(range(3, 60)), list(range(90, 130))]
    judges = [load_judge(path) for path in paths]
    expected = [greedy(judge, prompts, MAX_TOKENS, EOS_TOKEN_IDS) for judge in judges]
    with open_llm(paths[0]) as first, open_llm(paths[1], page_size=4) as second:
        streams = [llm.stream(prompts[0], GREEDY) for llm in (first, second)]
        tokens: list[list[int]] = [[], []]
        for chunks in zip_longest(*streams):  # one step of each in turns
            for got, chunk in zip(tokens, chunks, strict=True):
                got.extend(chunk.token_ids if chunk is not None else ())
        tally = Tally()
        for references, got in zip(expected, tokens, strict=True):
            tally.compare(references[0], got, "streamed in turns")
        with ThreadPoolExecutor(2) as threads:
            both = ((first, second), expected, ("of two threads",) * 2)
            assert len(list(threads.map(compare, *both))) == 2


def test_rope_of_long_sequences_is_exact_up_to_its_limit(tmp_path: Path) -> None:
    """transformers would rotate a whole batch as its longest sequence says."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + place for place in range(4)],
        "long_factor": [4.0 + place for place in range(4)],
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    name = "Phi3ForCausalLM"
    path = write_tiny_model(
        tmp_path / name,
        name,
        rope_parameters=rope,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
    )
    judge = load_judge(path)
    references = greedy(judge, [[5, 6, 7], list(range(3, 50))], MAX_TOKENS, EOS_TOKEN_IDS)
    with open_llm(path) as llm:
        compare(llm, references, "longrope")
        with pytest.raises(RequestError, match="64"):
            llm.generate([list(range(3, 70))], GREEDY, progress=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_card(model: tuple[Path, list[Reference]]) -> None:
    path, references = model
    with open_llm(path, device="cuda", dtype="float32", attention_backend="torch") as llm:
        compare(llm, references, f"{path.name} on a GPU")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_with_the_best_backend_of_a_card(tmp_path: Path, name: str) -> None:
    """Heads of 128 in bfloat16, as FlashInfer wants them; clear decisions survive that."""
    path = write_tiny_model(tmp_path / name, name, head_dim=128, num_attention_heads=4)
    judge = load_judge(path)
    prompts = [list(range(3, 3 + length)) for length in range(5, 150, 12)]
    clear = [one for one in greedy(judge, prompts, 1, EOS_TOKEN_IDS) if one.gaps[0] > 0.5]
    assert len(clear) > 4
    with open_llm(path, device="cuda", dtype="bfloat16") as llm:
        results = llm.generate([one.prompt for one in clear], GREEDY, progress=False)
    assert [one.token_ids[0] for one in results] == [one.tokens[0] for one in clear]


def test_the_missing_package_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny_model(tmp_path / "model", "Qwen3ForCausalLM")
    with (
        caplog.at_level(logging.WARNING),
        LLM(str(path), progress=False, plugins={"disabled": ["minisgl-models"]}) as llm,
    ):
        llm.generate([[5, 6, 7]], GREEDY, progress=False)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("Qwen3ForCausalLM runs by transformers' own code, eagerly")
    assert "the fast version is in minisgl-models (pip install minisgl-models)" in warning
    assert "Disabled: minisgl-models." in warning


def test_a_model_that_nobody_has_a_fast_version_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny_model(tmp_path / "model", "Olmo2ForCausalLM")
    with caplog.at_level(logging.WARNING), LLM(str(path), progress=False):
        pass
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "because no installed plugin offers it" in warning
    assert "minisgl-models" not in warning


def test_who_asks_for_transformers_is_not_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny_model(tmp_path / "LlamaForCausalLM", "LlamaForCausalLM")
    with caplog.at_level(logging.INFO), open_llm(path):
        pass
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    tables = [message for message in caplog.messages if message.startswith("backends:")]
    lines = [line.split() for table in tables for line in table.splitlines()]
    assert ["model", "any", "transformers", "minisgl-core", "chosen", "0"] in lines


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM"])
def test_random_weights(tmp_path: Path, name: str) -> None:
    path = write_tiny_model(tmp_path / name, name)
    (path / "model.safetensors").unlink()
    results = []
    for _ in range(2):
        with open_llm(path, load_format="dummy") as llm:
            (result,) = llm.generate([[5, 6, 7]], GREEDY, progress=False)
            results.append(result.token_ids)
    assert results[0] == results[1]


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "LlamaForCausalLM", "LlamaForCausalLM")
    with pytest.raises(SettingsError) as caught:
        open_llm(path, tp=2)
    message = str(caught.value)
    assert message.startswith("parallel.tensor_parallel_size=2: LlamaForCausalLM runs by ")
    assert "on one rank only; set it to 1" in message
    assert message.endswith("pip install minisgl-models")


def test_what_transformers_does_not_fit_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = write_tiny_model(
        tmp_path / "model", "Gemma3ForCausalLM", use_bidirectional_attention=True
    )
    with pytest.raises(ModelLoadError, match=r"its attention is not causal\. It needs a plugin"):
        LLM(str(path), progress=False)


def test_the_list_of_faster_packages_is_that_of_the_plugin() -> None:
    from minisgl_models.plugin import minisgl_models

    offered = {name for record in minisgl_models() for name in record.architectures}
    listed = {name for name, owner in FASTER_ELSEWHERE.items() if owner == "minisgl-models"}
    assert listed == offered
