"""Which prefills are replayed, what padding leaves alone, and that answers stay what they are."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl import LLM, SamplingParams
from minisgl.attention.batch import Batch
from minisgl.attention.interface import AttentionLayerSpec
from minisgl.attention.split import CutPlan, SplitBackend
from minisgl.bootstrap import memory
from minisgl.engine.engine import Engine, Prefilled
from minisgl.engine.prefill_graphs import MAX_SAMPLED, PrefillGraphs, prefill_sizes
from minisgl.settings import settings_from_keywords
from support.replays import EagerPieces, replay_prefills
from support.tiny_models import VOCAB_SIZE, write_tiny_model

SIZES = [4, 8, 16, 32]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen3", "Qwen3ForCausalLM")


def llm_of(path: Path, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {"page_size": 4, "num_pages": 60, "max_running_requests": 8}
    return LLM(str(path), device="cpu", dtype="float32", progress=False, **{**defaults, **settings})


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]


def graphs_of(llm: LLM) -> PrefillGraphs:
    assert isinstance(llm.engine, Engine)
    assert llm.engine.prefill_graphs is not None
    return llm.engine.prefill_graphs


@given(st.integers(1, 5000))
def test_sizes_are_close_and_end_with_the_most(most: int) -> None:
    sizes = prefill_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for below, size in pairwise(sizes):
        assert size - below <= max(16, below / 4)


@pytest.mark.parametrize("settings", [{}, {"max_prefill_tokens": 10}, {"prefix_cache": "naive"}])
def test_answers_are_those_of_eager_prefills(
    tiny: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths below, at and above recorded ones, several rows at once, cached prefixes, chunks."""
    lengths = [1, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 60]
    rounds = [prompts_of([length], seed=length) for length in lengths]
    rounds += [prompts_of([5, 6, 7], seed=100), prompts_of([40, 2, 11], seed=101), rounds[-1]]
    with llm_of(tiny, **settings) as llm:
        eager = [[one.token_ids for one in llm.generate(prompts, GREEDY)] for prompts in rounds]
    recorder = replay_prefills(monkeypatch, SIZES)
    with llm_of(tiny, **settings) as llm:
        replays = []
        for prompts, expected in zip(rounds, eager, strict=True):
            before = recorder.num_replays
            assert [one.token_ids for one in llm.generate(prompts, GREEDY)] == expected
            replays.append(recorder.num_replays - before)
        num_pieces = 1 + sum(1 for _ in graphs_of(llm)._recorded[4].cuts)
    assert recorder.num_pieces == num_pieces * len(SIZES)
    assert all(replays[:10]), "prompts of up to 32 tokens are replayed"
    if not settings:
        assert replays[10:12] == [0, 0], "longer ones run eagerly"


def test_invariant_17_padding_changes_nothing_in_the_pool(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prefill leaves its slots in the buffers; a short one after it must not use them."""
    replay_prefills(monkeypatch, [32])
    with llm_of(tiny) as llm:
        graphs = graphs_of(llm)
        run, written = graphs.run, []

        def watched(batch: Batch) -> torch.Tensor:
            pool = graphs._model.blocks[0].attention._kv_pool  # type: ignore[attr-defined]
            layers = [
                half for index in range(pool.spec.num_layers) for half in pool.flat_layer(index)
            ]
            for half in layers:
                half.normal_()  # as if all pages were somebody else's by now
            before = [half.clone() for half in layers]
            for half in layers:
                half[batch.slots] = torch.nan
            logits = run(batch)
            assert not any(half[batch.slots].isnan().any() for half in layers), "all are stored"
            changed = torch.stack(
                [(one != other).any(-1).any(-1) for one, other in zip(before, layers, strict=True)]
            ).any(0)
            others = torch.ones(len(changed), dtype=torch.bool)
            others[batch.slots] = False
            others[: batch.page_size] = False  # the dummy page
            assert not changed[others].any(), "a slot of nobody in this launch"
            written.append(len(batch.slots))
            return logits

        monkeypatch.setattr(graphs, "run", watched)
        llm.generate(prompts_of([30]), GREEDY)
        llm.generate(prompts_of([2], seed=1), GREEDY)
    assert written == [30, 2]


def test_launches_that_do_not_fit_run_eagerly(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_prefills(monkeypatch, SIZES)
    with llm_of(tiny) as llm:
        graphs = graphs_of(llm)

    def fits(tokens: int, sampled: int | None, decoding: int = 0) -> bool:
        batch: Any = SimpleNamespace(
            num_tokens=tokens,
            num_decode_rows=decoding,
            sample_indices=None if sampled is None else torch.zeros(sampled),
        )
        return graphs.fits(batch)

    assert fits(32, 1)
    assert fits(20, MAX_SAMPLED)
    assert fits(20, 0), "a chunk in the middle of a prompt"
    assert not fits(33, 1)
    assert not fits(20, MAX_SAMPLED + 1)
    assert not fits(20, 1, decoding=1)
    assert not fits(20, None)


def test_many_short_prompts_at_once_get_their_answers(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of([1] * 24, seed=3)
    with llm_of(tiny, max_running_requests=24) as llm:
        expected = [one.token_ids for one in llm.generate(prompts, GREEDY)]
    replay_prefills(monkeypatch, SIZES)
    with llm_of(tiny, max_running_requests=24) as llm:
        assert [one.token_ids for one in llm.generate(prompts, GREEDY)] == expected


def test_a_pass_that_cannot_be_recorded_ends_its_piece() -> None:
    class Failing:
        num_passes = 0

        def forward(self, batch: Batch) -> torch.Tensor:
            self.num_passes += 1
            if self.num_passes == 2:
                raise ValueError("not twice")
            return torch.zeros(1, 1)

    recorder = EagerPieces()
    model: Any = Failing()
    graphs = PrefillGraphs(model, model, [4], torch.device("cpu"), recorder)
    with pytest.raises(ValueError, match="not twice"):
        graphs.record(lambda sizes: sizes)
    assert recorder.num_given_up == 1


class Timed:
    """An engine whose prefills take a millisecond to launch, and longer from 200 tokens on."""

    def __init__(self) -> None:
        self.info = SimpleNamespace(max_seq_len=4096)
        self.measured: list[int] = []

    def warm_up(self, num_tokens: int, *, most_rows: int) -> Prefilled:
        self.measured.append(num_tokens)
        return Prefilled(1e-3, max(1e-3, num_tokens * 1e-5 - 1e-3))


@pytest.mark.parametrize(
    ("wanted", "largest", "measures"), [(None, 192, True), (512, 512, False), (0, None, False)]
)
def test_graphs_are_recorded_as_far_as_they_pay(
    wanted: int | None, largest: int | None, measures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = Timed()
    context: Any = SimpleNamespace(device=torch.device("cuda"), attention=None)
    made: list[list[int]] = []
    monkeypatch.setattr(memory, "PrefillGraphs", lambda *args: made.append(args[2]))
    settings = settings_from_keywords(
        engine={} if wanted is None else {"prefill_graph_max_tokens": wanted}
    )
    model: Any = None
    memory.make_prefill_graphs(settings, model, context, engine=engine)
    assert [sizes[-1] for sizes in made] == ([] if largest is None else [largest])
    assert bool(engine.measured) == measures


def test_only_plans_of_a_recording_are_cut() -> None:
    q, layer = (
        torch.zeros(2, 1, 8),
        AttentionLayerSpec(index=0, num_q_heads=1, num_kv_heads=1, head_dim=8, scale=1.0),
    )
    calls: list[tuple[Any, ...]] = []

    class Backend:
        cuda_graphs = None
        store_fusion = True
        takes_shared_prefixes = False

        def plan(self, batch: Any, slot: int) -> Any:
            return batch, slot

        def attend(self, *arguments: Any) -> torch.Tensor:
            calls.append(arguments)
            return q + 1

    class Seam:
        def cut(self, q: torch.Tensor, layer: AttentionLayerSpec, new_kv: Any) -> torch.Tensor:
            return q - 1

    inner: Any = Backend()
    split = SplitBackend(inner)
    assert split.store_fusion
    batch: Any = "batch"
    assert split.plan(batch, 1) == ("batch", 1)
    assert split.attend(q, layer, "plan", (q, q))[0, 0, 0] == 1
    assert calls == [(q, layer, "plan", (q, q))]
    assert split.attend(q, layer, CutPlan(Seam()))[0, 0, 0] == -1
