"""Decode steps that are recorded and replayed: the same tokens, whatever the padding."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl import LLM, SamplingParams
from support.examples import scaled
from support.replays import replay_decode_steps
from support.tiny_models import write_tiny_model

PROMPTS = [[(11 * n + 5 * k) % 250 + 5 for k in range(3 + 7 * n)] for n in range(8)]
KINDS: list[dict[str, float]] = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.7},
    {"temperature": 1, "top_k": 1},
    {"temperature": 0.9, "top_k": 12, "min_p": 0.05},
    {"temperature": 0, "min_tokens": 9},
    {"temperature": 0.8, "repetition_penalty": 1.5, "presence_penalty": 1},
    {"temperature": 1, "frequency_penalty": 1.5, "top_p": 0.9, "min_tokens": 5},
]


def params_of(place: int) -> SamplingParams:
    return SamplingParams(max_tokens=12, seed=place, **KINDS[place])  # type: ignore[arg-type]


def outputs(llm: LLM, places: list[int]) -> list[list[int]]:
    results = llm.generate(
        [PROMPTS[place] for place in places], [params_of(place) for place in places], progress=False
    )
    return [result.token_ids for result in results]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "qwen3"
    return write_tiny_model(folder, "Qwen3ForCausalLM", vocab_size=259)


@pytest.fixture(scope="module")
def alone(model: Path) -> list[list[int]]:
    with LLM(str(model), progress=False, max_running_requests=1) as llm:
        return [outputs(llm, [place])[0] for place in range(len(PROMPTS))]


@given(
    page_size=st.sampled_from([1, 5, 16]),
    sizes=st.sets(st.integers(1, 6), min_size=1, max_size=3),
    rows=st.integers(1, 6),
    launch=st.sampled_from(["mixed", "split"]),
    orders=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=8), min_size=1, max_size=2),
)
@settings(max_examples=scaled(25))  # an example builds an engine and runs a real model
def test_invariant_17_replayed_steps_do_not_depend_on_their_padding(
    model: Path,
    alone: list[list[int]],
    page_size: int,
    sizes: set[int],
    rows: int,
    launch: str,
    orders: list[list[int]],
) -> None:
    """Filters, seeds, penalties and bans included; launches beyond the largest graph run eagerly.

    Catches: padding that writes to a real page or row, a plan that a replay does not apply or
    applies late, rows that keep the token drawn before their filter.
    """
    with pytest.MonkeyPatch.context() as patch:
        recorder = replay_decode_steps(patch, sorted({min(size, rows) for size in sizes}))
        with LLM(
            str(model),
            progress=False,
            page_size=page_size,
            num_pages=-(-400 // page_size),
            max_running_requests=rows,
            scheduler={"launch": launch, "overlap": "on"},
        ) as llm:
            for places in orders:
                assert outputs(llm, places) == [alone[place] for place in places]
    if max(sizes) >= rows and launch == "split":
        assert recorder.num_replays
