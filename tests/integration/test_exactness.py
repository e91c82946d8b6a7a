"""Greedy output is token for token that of transformers, whatever the schedule (DESIGN 7).

Tiny random models of every architecture; the real model is in ``test_smollm2.py``.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from minisgl import LLM, SamplingParams
from support.pressure import Pressure
from support.reference import Reference, Tally, greedy
from support.tiny_models import ARCHITECTURES, EOS_TOKEN_IDS, write_tiny_model

MAX_TOKENS = 20


def spread(setups: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """All set-ups for the first architecture, and for each of the others another third of them."""
    return [
        (architecture, *setup)
        for number, architecture in enumerate(ARCHITECTURES)
        for place, setup in enumerate(setups)
        if number == 0 or (place + number) % 3 == 0
    ]


Model = tuple[Path, list[Reference]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Makes each architecture's model once, and what transformers says to it."""
    return cache(partial(make_model, tmp_path_factory.mktemp("tiny")))


def make_model(folder: Path, architecture: str) -> Model:
    """A tiny checkpoint, and transformers' continuations of 16 prompts, some with shared heads."""
    path = write_tiny_model(folder / architecture, architecture)
    random = np.random.default_rng(7)
    shared = random.integers(3, 263, size=40).tolist()
    lengths = [1, 2, 3, 15, 16, 17, 31, 33, 48, 63, 64, 65, 80, 100, 130, 150]
    prompts = [
        (shared if place % 3 == 0 else [])[: length - 1]
        + random.integers(3, 263, size=max(length - (40 if place % 3 == 0 else 0), 1)).tolist()
        for place, length in enumerate(lengths)
    ]
    judge = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return path, greedy(judge, prompts, MAX_TOKENS, EOS_TOKEN_IDS)


def check(path: Path, references: list[Reference], **settings: Any) -> Pressure:
    """Generate in batches of 16, 1 and 5, cold and then warm, and compare.

    Returns how short pages were meanwhile.
    """
    tally = Tally()
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with LLM(str(path), progress=False, max_running_requests=16, **settings) as llm:
        pressure = Pressure(llm)
        for batch_size in (16, 1, 5):
            for first in range(0, 16 if batch_size > 1 else 4, batch_size):
                batch = references[first : first + batch_size]
                results = llm.generate([one.prompt for one in batch], params, progress=False)
                for reference, result in zip(batch, results, strict=True):
                    tally.compare(reference, result.token_ids, f"{settings}")
                    stopped = reference.tokens[-1] in EOS_TOKEN_IDS
                    assert result.finish_reason == ("stop" if stopped else "length")
                    assert result.num_prompt_tokens == len(reference.prompt)
        tally.check()
        return pressure


@pytest.mark.parametrize(
    ("architecture", "page_size", "overlap", "prefix_cache"),
    spread(list(product((1, 16, 64), ("on", "off"), ("radix", "naive")))),
)
def test_every_page_size_loop_and_cache(
    models: Callable[[str], Model],
    architecture: str,
    page_size: int,
    overlap: str,
    prefix_cache: str,
) -> None:
    check(
        *models(architecture),
        page_size=page_size,
        prefix_cache=prefix_cache,
        scheduler={"overlap": overlap},
    )


@pytest.mark.parametrize(
    ("architecture", "page_size", "budget", "launch"),
    spread(
        [
            (*sizes, launch)
            for sizes in ((1, 1), (1, 7), (16, 16), (16, 50), (64, 64))
            for launch in ("mixed", "split")
        ]
    ),
)
def test_every_chunk_budget_down_to_one_page(
    models: Callable[[str], Model], architecture: str, page_size: int, budget: int, launch: str
) -> None:
    scheduler = {"launch": launch, "overlap": "on" if launch == "split" else "off"}
    check(
        *models(architecture), page_size=page_size, max_prefill_tokens=budget, scheduler=scheduler
    )


@pytest.mark.parametrize(
    ("architecture", "page_size", "num_pages", "overlap"),
    spread([(*s, overlap) for s in ((1, 175), (16, 14), (64, 4)) for overlap in ("on", "off")]),
)
def test_page_pressure_evicts_and_retracts_without_a_trace(
    models: Callable[[str], Model], architecture: str, page_size: int, num_pages: int, overlap: str
) -> None:
    pressure = check(
        *models(architecture),
        page_size=page_size,
        num_pages=num_pages,
        max_prefill_tokens=64,
        scheduler={"overlap": overlap},
    )
    assert pressure.num_evicted > 0
    assert pressure.num_retracted > 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_batch_size_from_1_to_16(models: Callable[[str], Model], architecture: str) -> None:
    path, references = models(architecture)
    tally = Tally()
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with LLM(str(path), progress=False, page_size=16, prefix_cache="naive") as llm:
        for size in range(1, 17):
            batch = references[16 - size :]
            results = llm.generate([one.prompt for one in batch], params, progress=False)
            for reference, result in zip(batch, results, strict=True):
                tally.compare(reference, result.token_ids, f"batch of {size}")
    tally.check()
