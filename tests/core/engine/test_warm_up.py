"""What runs before the first request: everything that is new the first time, and no trace of it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.bootstrap import build_scheduler
from minisgl.bootstrap import engine as bootstrap_engine
from minisgl.bootstrap.stages import Stages
from minisgl.engine import logits_bound
from minisgl.engine.device_reports import ScoredChunk
from minisgl.engine.engine import Engine
from minisgl.engine.logits import ChangedLogits, SampledRows
from minisgl.scheduler.transport import MemoryTransport
from minisgl.settings import settings_from_keywords
from support.replays import replay_decode_steps
from support.tiny_models import VOCAB_SIZE, write_tiny_model

NAMES = (
    "advance_rows", "apply_plan", "bias_logits", "ban_sequences", "mask_logits", "mask_tokens",
    "penalize", "sample_filtered", "sample_gumbel", "token_logprobs",
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", "LlamaForCausalLM")


def engine_for(path: Path, num_rows: int, dtype: str = "float32") -> Engine:
    settings = settings_from_keywords(
        model=str(path), device="cpu", dtype=dtype, max_running_requests=num_rows, page_size=4,
        num_pages=40, max_seq_len=150,
    )  # fmt: skip
    engine = build_scheduler(settings, MemoryTransport(), progress=False)._engine
    assert isinstance(engine, Engine)
    return engine


@pytest.mark.parametrize("num_rows", [1, 2, 3, 6])
@pytest.mark.parametrize("budget", [1, 20])
def test_every_operation_has_run_in_every_dtype_before_the_first_request(
    num_rows: int, budget: int, tiny: Path
) -> None:
    """Catches: a first request with top-k, or with a penalty, that waits for a compiler.

    As on a GPU without graphs; where they are recorded, a decode step has run anyway.
    """
    engine, called = engine_for(tiny, num_rows, "bfloat16"), set()
    ops = engine.state.ops

    def noting(name: str) -> Any:
        def noted(first: torch.Tensor, *rest: Any) -> Any:
            called.add((name, first.dtype if isinstance(first, torch.Tensor) else None))
            return getattr(ops, name)(first, *rest)

        return noted

    engine.state.ops = replace(ops, **{name: noting(name) for name in NAMES})
    engine._processing._ops = engine.state.ops
    settings = settings_from_keywords(
        model=str(tiny), max_prefill_tokens=budget, cuda_graph_max_rows=0
    )
    on_card: Any = SimpleNamespace(device=torch.device("cuda"))
    bootstrap_engine._warm_up(engine, settings, engine._model, on_card, Stages(), progress=False)
    half, single = torch.bfloat16, torch.float32
    in_both = {"sample_gumbel", "sample_filtered", "mask_tokens"}
    of_changed = {"bias_logits", "ban_sequences", "mask_logits", "penalize"}
    assert called == {
        *((name, dtype) for name in in_both for dtype in (half, single)),
        *((name, single) for name in of_changed),
        ("token_logprobs", half),
        ("advance_rows", None),
        ("apply_plan", torch.int32),
    }


@pytest.mark.parametrize("graphs", [False, True])
def test_no_trace_of_its_rows_stays(
    graphs: bool, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: controls that are looked up in every step, and rows that a recorded step feeds."""
    if graphs:
        replay_decode_steps(monkeypatch, [4])
    engine = engine_for(tiny, 4)
    rows = np.arange(4)
    for filtered, controlled in ((False, False), (True, True)):
        engine.warm_up(12, filtered=filtered, controlled=controlled)
        assert engine._processing.concerns(rows, np.full(4, 3)) is None
        assert not engine._mirror.has_masks
        assert not len(engine._mirror.decode_rows)
        assert not engine.state.inbox[:10].any()
        assert engine.state.rows.order.tolist() == [4] * 4
        assert not engine.state.rows.lengths.any()
        assert not len(engine.state.decode_rows)


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "scored", "lengths"),
    [
        (4, 200, [19], [20, 60, 60, 60]),
        (4, 50, [19], [20, 10, 10, 10]),
        (4, 13, [9], [10, 1, 1, 1]),
        (40, 120, [19], [20] + [3] * 22 + [2] * 17),
        (2, 150, [19], [20, 130]),
        (1, 150, [19], [20]),
    ],
)
def test_the_largest_controlled_step_takes_every_path(
    num_rows: int, num_tokens: int, scored: list[int], lengths: list[int], tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Catches: a peak of memory that nobody has planned for, met by the first such requests.

    Prompts with log-probabilities up to the limit of a step, and a row that asks for nothing beside
    the others: its logits and theirs, in float32, are there at the same time.
    """
    engine = engine_for(tiny, num_rows)
    monkeypatch.setattr(logits_bound, "_SCORED", 20 * VOCAB_SIZE)
    processing, found, prefilled = engine._processing, [], []
    change, score = processing.change, processing.score

    def noting(logits: torch.Tensor, sampled: SampledRows) -> ChangedLogits | None:
        changed = change(logits, sampled)
        assert changed is not None
        found.append((len(sampled.host_rows), len(changed.places)))
        prefilled.append(sampled.lengths.tolist())
        return changed

    def scoring(logits: torch.Tensor, chunks: list[ScoredChunk]) -> None:
        assert [chunk.num_tokens for chunk in chunks] == scored
        found.append((len(logits), 0))
        score(logits, chunks)

    monkeypatch.setattr(processing, "change", noting)
    monkeypatch.setattr(processing, "score", scoring)
    engine.warm_up(num_tokens, filtered=True, controlled=True)
    changed = max(1, num_rows - 1)
    assert found == [(sum(scored), 0), (num_rows, changed), (num_rows, changed)]
    assert prefilled == [lengths, [length + 1 for length in lengths]]


def test_several_short_prompts_are_scored_where_none_may_be_long(tiny: Path) -> None:
    settings = settings_from_keywords(
        model=str(tiny), device="cpu", max_running_requests=5, max_seq_len=6
    )
    engine = build_scheduler(settings, MemoryTransport(), progress=False)._engine
    assert isinstance(engine, Engine)
    scored: list[int] = []

    def scoring(logits: torch.Tensor, chunks: list[ScoredChunk]) -> None:
        scored.extend(chunk.num_tokens for chunk in chunks)

    engine._processing.score = scoring  # type: ignore[method-assign]
    engine.warm_up(100, controlled=True)
    assert scored == [5] * 4, "the last row asks for nothing; none has room to decode"
