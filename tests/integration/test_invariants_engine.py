"""Invariants 9 and 18 (DESIGN section 7) with the real engine, on a tiny model."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minisgl import LLM, SamplingParams
from support.examples import scaled
from support.tiny_models import write_tiny_model

PROMPTS = [
    [5, 6, 7, 8] * 5 + [9],
    [5, 6, 7, 8] * 5 + [10, 11],
    [5, 6, 7, 8] * 3,
    [200],
    [100, 3] * 14,
    list(range(3, 40)),
]
PLAIN: dict[str, Any] = {
    "page_size": 1,
    "prefix_cache": "naive",
    "scheduler": {"overlap": "off", "launch": "mixed"},
    "max_prefill_tokens": 4096,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model of two layers."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


def params_of(place: int) -> SamplingParams:
    """Greedy, sampled and filtered requests with seeds, one kind a prompt."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 1.2, "top_p": 0.7},
        {"temperature": 1, "top_k": 1},
        {"temperature": 0.9, "top_k": 12, "min_p": 0.05},
        {"temperature": 0, "min_tokens": 9},
    ]
    return SamplingParams(max_tokens=12, seed=place, **kinds[place])


def outputs(llm: LLM, places: list[int]) -> list[tuple[list[int], str]]:
    """Generate for some of the prompts in one batch."""
    results = llm.generate(
        [PROMPTS[place] for place in places], [params_of(place) for place in places], progress=False
    )
    return [(result.token_ids, str(result.finish_reason)) for result in results]


@pytest.fixture(scope="module")
def alone(model: Path) -> list[tuple[list[int], str]]:
    """Each prompt's output, generated alone by the plainest engine."""
    with LLM(str(model), progress=False, **PLAIN) as llm:
        return [outputs(llm, [place])[0] for place in range(len(PROMPTS))]


@pytest.mark.slow
@example(
    page_size=1,
    spare=0,
    rows=1,
    budget=8,
    scheduler={"overlap": "on", "launch": "mixed"},
    prefix_cache="radix",
    rounds=[list(range(len(PROMPTS)))],
)
@given(
    page_size=st.sampled_from([1, 2, 5, 16, 64]),
    spare=st.integers(0, 60),
    rows=st.integers(1, 6),
    budget=st.integers(1, 80),
    scheduler=st.fixed_dictionaries(
        {"overlap": st.sampled_from(["on", "off"]), "launch": st.sampled_from(["mixed", "split"])}
    ),
    prefix_cache=st.sampled_from(["radix", "naive"]),
    rounds=st.lists(st.permutations(range(len(PROMPTS))), min_size=1, max_size=2),
)
@settings(max_examples=scaled(20))  # an example builds an engine and runs a real model
def test_invariant_09_the_real_engine_gives_equal_tokens_in_any_set_up(
    model: Path,
    alone: list[tuple[list[int], str]],
    page_size: int,
    spare: int,
    rows: int,
    budget: int,
    scheduler: dict[str, str],
    prefix_cache: str,
    rounds: list[list[int]],
) -> None:
    """Cold and warm cache, scarce pages, few rows, any order: the tokens are those of each alone.

    Catches: what a fake engine cannot, such as a position, a slot or a mask that a chunk or a
    cached prefix gets wrong, and seeded noise that depends on the batch.
    """
    with LLM(
        str(model),
        progress=False,
        page_size=page_size,
        num_pages=max(2, -(-(50 + spare) // page_size)),  # the dummy page and one more
        max_running_requests=rows,
        max_prefill_tokens=budget,
        prefix_cache=prefix_cache,
        scheduler=scheduler,
    ) as llm:
        for places in rounds:
            assert outputs(llm, places) == [alone[place] for place in places]


@pytest.mark.slow
@example([1, 2])
@given(st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=8))
@settings(max_examples=scaled(40))  # an example runs a real model
def test_invariant_18_outputs_of_the_real_engine_do_not_depend_on_the_batch(
    shared: LLM, alone: list[tuple[list[int], str]], places: list[int]
) -> None:
    """Greedy is argmax and a seed fixes the noise, in whatever company, even one's own twin.

    Catches: sampling parameters that land in another row, noise keyed by the row.
    """
    assert outputs(shared, places) == [alone[place] for place in places]
    with_top_k = SamplingParams(temperature=1.3, top_k=1, max_tokens=6)
    greedy = SamplingParams(temperature=0, max_tokens=6)
    prompts = [PROMPTS[places[0]]] * 2
    first, second = shared.generate(prompts, [with_top_k, greedy], progress=False)
    assert first.token_ids == second.token_ids


@pytest.fixture(scope="module")
def shared(model: Path) -> Any:
    """One engine for all examples: its cache is as warm as it gets."""
    with LLM(str(model), progress=False, max_running_requests=8) as llm:
        yield llm
