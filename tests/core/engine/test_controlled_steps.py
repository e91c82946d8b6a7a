"""Rows with controls, with masks and with nothing in one batch, recorded and not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.engine.engine import Engine
from support import controlled_steps
from support.controlled_steps import BOTH, MASKED, PENALIZED, ROWS, engine_for, plans, run
from support.replays import replay_decode_steps
from support.tiny_models import write_tiny_model

NUM_STEPS = 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen3", "Qwen3ForCausalLM")


@pytest.fixture(params=["eager", "replayed"])
def recorded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether decode steps are replays."""
    if request.param == "replayed":
        replay_decode_steps(monkeypatch, [ROWS])
    return bool(request.param == "replayed")


@pytest.fixture(params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, recorded: bool, tiny: Path) -> Engine:
    built = engine_for(tiny, device="cpu", dtype=request.param)
    assert (built.graphs is not None) == recorded
    return built


def test_each_row_gets_what_it_asks_for_beside_the_others(engine: Engine) -> None:
    """Catches: a row that keeps the token of the graph, a mask or a penalty on another row."""
    for asks in (True, False, True):
        controlled_steps.check(run(engine, plans(engine, NUM_STEPS, asks=asks)), asks=asks)


def test_what_others_ask_for_changes_no_bit_of_a_row(engine: Engine) -> None:
    found = [run(engine, plans(engine, NUM_STEPS, asks=asks)) for asks in (True, False)]
    for beside, alone in zip(*found, strict=True):
        assert torch.equal(beside.logits[:PENALIZED], alone.logits[:PENALIZED])
        assert beside.tokens[:PENALIZED] == alone.tokens[:PENALIZED]


def test_rows_without_changes_are_drawn_from_the_logits_as_the_model_made_them(
    recorded: bool, tiny: Path
) -> None:
    """Catches: all rows of a batch in float32, as one of them has a penalty.

    A kernel may add up in another order then: its token is another one now and then.
    """
    engine = engine_for(tiny, device="cpu", dtype="bfloat16")
    drawn: list[tuple[torch.dtype, int]] = []
    ops = engine.state.ops

    def noting(sample: Any) -> Any:
        def noted(logits: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
            drawn.append((logits.dtype, len(logits)))
            tokens: torch.Tensor = sample(logits, *params)
            return tokens

        return noted

    engine.state.ops = replace(
        ops,
        sample_gumbel=noting(ops.sample_gumbel),
        sample_filtered=noting(ops.sample_filtered),
    )
    run(engine, plans(engine, 2, asks=True))
    assert {PENALIZED, MASKED, BOTH} == set(range(3, ROWS))
    prefill = [(torch.bfloat16, 4), (torch.float32, 2)]
    # The graph draws all rows; of those drawn again one has filters, and one a mask.
    decode = [(torch.bfloat16, ROWS), (torch.bfloat16, 2), (torch.float32, 2)]
    assert drawn == prefill + (decode if recorded else prefill)
