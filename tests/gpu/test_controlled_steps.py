"""Rows with controls, masks and nothing in one batch, on a card: behind graphs, without waiting."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from minisgl.engine.engine import Engine
from minisgl.plugins.host import load_plugins
from support import controlled_steps
from support.controlled_steps import PENALIZED, ROWS, engine_for, plans, run, run_ahead
from support.tiny_models import WIDE, write_tiny_model

pytestmark = pytest.mark.gpu

NUM_STEPS = 24


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide") / "qwen3"
    return write_tiny_model(folder, "Qwen3ForCausalLM", **WIDE)


def on_card(path: Path, *, graphs: bool, backend: str = "flashinfer") -> Engine:
    if backend not in {offer.name for offer in load_plugins().attention}:
        pytest.skip(f"needs the attention backend {backend}")
    engine = engine_for(
        path, device="cuda", dtype="bfloat16", attention_backend=backend,
        cuda_graph_max_rows=None if graphs else 0,
    )  # fmt: skip
    assert (engine.graphs is not None) == graphs
    return engine


def test_rows_drawn_again_behind_a_graph_are_those_of_steps_without(wide: Path) -> None:
    """Each token is right for its step's own logits; those are the same up to roundings."""
    found = []
    for graphs in (True, False):
        engine = on_card(wide, graphs=graphs)
        for asks in (True, False, True):
            steps = run(engine, plans(engine, NUM_STEPS, asks=asks))
            controlled_steps.check(steps, asks=asks)
        found.append(steps)
    num_compared = 0
    for row in range(ROWS):
        for one, other in zip(*found, strict=True):
            error = (one.logits[row] - other.logits[row]).norm() / other.logits[row].norm()
            assert error < 0.04, f"row {row}: relative error {error:.3f}"
            num_compared += 1
            if one.tokens[row] != other.tokens[row]:
                break  # two were close: the texts differ from here on
    assert num_compared > ROWS * NUM_STEPS // 3


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("backend", ["flashinfer", "torch"])
def test_what_others_ask_for_changes_no_bit_of_a_row(
    wide: Path, graphs: bool, backend: str
) -> None:
    if backend == "torch" and graphs:
        pytest.skip("takes no part in graphs")
    engine = on_card(wide, graphs=graphs, backend=backend)
    found = [run(engine, plans(engine, NUM_STEPS, asks=asks)) for asks in (True, False)]
    for beside, alone in zip(*found, strict=True):
        assert torch.equal(beside.logits[:PENALIZED], alone.logits[:PENALIZED])
        assert beside.tokens[:PENALIZED] == alone.tokens[:PENALIZED]


@contextmanager
def no_waits() -> Iterator[None]:
    """Let torch raise where the host would wait for the device; events are waited for as ever."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("steady", [True, False], ids=["steady", "admission"])
def test_no_step_with_controls_waits_for_the_device(wide: Path, graphs: bool, steady: bool) -> None:
    """Catches: a number assigned on the device, a list of places that is made there."""
    engine = on_card(wide, graphs=graphs)
    expected = run_ahead(engine, plans(engine, NUM_STEPS, asks=True))
    again = plans(engine, NUM_STEPS, asks=True)
    tokens = run_ahead(engine, itertools.islice(again, 2)) if steady else []
    with no_waits():
        tokens += run_ahead(engine, again)
    assert tokens == expected
