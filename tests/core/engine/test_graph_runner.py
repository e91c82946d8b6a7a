"""Which graphs are recorded, which one a launch replays, and what runs without any."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl import LLM, SamplingParams
from minisgl.attention.batch import Batch
from minisgl.bootstrap import build_scheduler
from minisgl.engine.engine import Engine
from minisgl.engine.graph_runner import GraphRunner, graph_sizes, shared_sizes
from minisgl.engine.plan import CHUNK, ROW_PARAMS, BatchPlan
from minisgl.engine.plan_codec import PlanLayout
from minisgl.engine.row_state import RowState
from minisgl.engine.staging import PlanStager
from minisgl.scheduler.transport import MemoryTransport
from minisgl.settings import settings_from_keywords
from support.replays import EagerRecorder, ReplayableBackend, replay_decode_steps
from support.tiny_models import write_tiny_model

NUM_ROWS, PAGE_SIZE, VOCAB = 6, 4, 32


@given(st.integers(1, 2000))
def test_graphs_hold_any_launch_with_little_padding(max_rows: int) -> None:
    sizes = graph_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == max_rows, "the largest launch is a graph, and nothing larger"
    for below, size in pairwise(sizes):
        assert size - below <= max(1, 4 if below < 8 else 8 if below < 256 else 16)


def test_few_rows_have_close_graphs() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(3) == [1, 2, 3]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(300)[-4:] == [256, 272, 288, 300]


@given(st.integers(1, 2000))
def test_graphs_for_rows_that_share_are_further_apart(max_rows: int) -> None:
    sizes = graph_sizes(max_rows)
    shared = shared_sizes(sizes)
    assert set(shared) <= set(sizes)
    assert shared[-1] == max_rows
    assert len(shared) <= 2 + 2 * max_rows.bit_length()
    for below, size in pairwise(shared):
        assert 1.5 * below <= size <= 2 * below + 8, "little padding, few graphs"


class Successor:
    """A model whose next token is the last one plus 1."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def forward(self, batch: Batch) -> torch.Tensor:
        self.num_rows.append(len(batch.input_ids))
        return torch.nn.functional.one_hot(batch.input_ids + 1, VOCAB).float()


class Backend:
    """Notes what it is asked to plan."""

    def __init__(self) -> None:
        self.cuda_graphs = self
        self.captured: list[int] = []
        self.replays: list[tuple[int, list[int], int]] = []

    def prepare_capture(self, batch: Batch) -> int:
        self.captured.append(len(batch.kv_lens))
        return len(batch.kv_lens)

    def enqueue(self, batch: Batch, plan: int) -> None:
        assert plan == len(batch.input_ids)

    def prepare_replay(self, plan: int, kv_lens: npt.NDArray[np.int32], slot: int) -> None:
        self.replays.append((plan, kv_lens.tolist(), slot))


class Forgetful(EagerRecorder):
    """Counts how often everything was given back."""

    num_forgotten = 0

    def forget(self) -> None:
        self.num_forgotten += 1


class Rig:
    """A runner over rows of a real state, a model that counts, and a backend that notes."""

    def __init__(self, sizes: list[int]) -> None:
        self.state = RowState(NUM_ROWS, 40, PAGE_SIZE, torch.device("cpu"), inbox=True)
        self.model, self.backend, self.recorder = Successor(), Backend(), Forgetful()
        arguments: tuple[Any, ...] = (self.model, self.backend, self.state, sizes, self.recorder)
        self.runner = GraphRunner(*arguments)
        self._stager = PlanStager(pin=False)
        self._number = 0

    def receive(self, **fields: Any) -> None:
        words = self._stager.stage(BatchPlan(number=self._number, **fields))
        self._number += 1
        self.state.receive(words, PlanLayout.of(words))

    def record(self) -> None:
        self.receive()  # an empty plan: recording applies what is in the inbox
        self.runner.record(lambda sizes: sizes)

    def add(self, rows: list[int]) -> None:
        """Let greedy rows decode, each with a page, whose last token is its own number."""
        added = np.zeros(len(rows), dtype=ROW_PARAMS)
        added["row"], added["top_p"] = rows, 1
        writes = np.array([(row, 0, row + 1) for row in rows], dtype=np.int32)
        order = np.array(rows, dtype=np.int32)
        self.state.rows.last_token[rows] = torch.tensor(rows)
        self.receive(added=added, table_writes=writes, decode_rows=order, num_decode_rows=len(rows))


def test_the_largest_graph_is_recorded_first() -> None:
    rig = Rig([4, 1, 2])
    shown: list[int] = []
    rig.receive()
    rig.runner.record(lambda sizes: shown.extend(sizes) or sizes)  # type: ignore[func-returns-value]
    assert rig.backend.captured == shown == [4, 2, 1], "the others fit into its memory"
    assert rig.runner.max_rows == 4


def test_recording_changes_no_row() -> None:
    rig = Rig([1, 4])
    rig.record()
    assert rig.state.rows.lengths.tolist() == [0] * (NUM_ROWS + 1)
    assert rig.state.rows.last_token[:NUM_ROWS].tolist() == [0] * NUM_ROWS


def test_a_rehearsal_records_the_largest_graph_alone_and_gives_it_back() -> None:
    rig = Rig([1, 2, 4])
    rig.receive()
    rig.runner.record_largest()
    assert rig.backend.captured == [4]
    rig.runner.forget()
    assert rig.recorder.num_forgotten == 1
    with pytest.raises(KeyError):
        rig.runner.replay(np.ones(4, dtype=np.int32), 0)


@pytest.mark.parametrize(
    ("rows", "size"), [([3], 1), ([5, 0], 2), ([2, 4, 1], 4), ([0, 1, 2, 3], 4)]
)
def test_a_launch_replays_the_smallest_graph_that_holds_it(rows: list[int], size: int) -> None:
    rig = Rig([1, 2, 4])
    rig.record()
    rig.model.num_rows.clear()
    rig.add(rows)
    expected = [row + 1 for row in rows]
    for step in (1, 2, 3):
        if step > 1:
            rig.receive(num_decode_rows=len(rows))
        logits, tokens = rig.runner.replay(np.full(len(rows), step, dtype=np.int32), step % 2)
        assert tokens.tolist() == logits.argmax(-1).tolist() == expected
        assert rig.state.rows.last_token[rows].tolist() == expected
        assert rig.state.rows.lengths[rows].tolist() == [step] * len(rows)
        assert rig.state.rows.lengths[NUM_ROWS] == 0, "padding never grows"
        padded = [step] * len(rows) + [1] * (size - len(rows))
        assert rig.backend.replays[-1] == (size, padded, step % 2)
        expected = [token + 1 for token in expected]
    assert rig.model.num_rows == [size] * 3
    assert rig.recorder.num_replays == 3


def test_padding_of_an_earlier_replay_is_not_read_again() -> None:
    """Catches: lengths of rows that have left stay in the next replay's padding."""
    rig = Rig([4])
    rig.record()
    rig.add([0, 1, 2, 3])
    rig.runner.replay(np.full(4, 9, dtype=np.int32), 0)
    rig.receive(decode_rows=np.array([2], dtype=np.int32), num_decode_rows=1)
    rig.runner.replay(np.array([10], dtype=np.int32), 1)
    assert rig.backend.replays[-1] == (4, [10, 1, 1, 1], 1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", "LlamaForCausalLM")


def test_a_launch_larger_than_the_largest_graph_runs_eagerly(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = replay_decode_steps(monkeypatch, [1, 2])
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [[7, 8, 9 + place] for place in range(3)]
    with LLM(
        str(tiny), progress=False, num_pages=20, max_running_requests=3, prefix_cache="naive",
        scheduler={"launch": "split", "overlap": "off"},
    ) as llm:  # fmt: skip
        alone = [llm.generate([prompt], params, progress=False)[0].token_ids for prompt in prompts]
        assert recorder.num_replays == 3 * 5, "the first token of a text is the prompt's"
        pair = llm.generate(prompts[:2], params, progress=False)
        assert recorder.num_replays == 4 * 5
        together = llm.generate(prompts, params, progress=False)
        assert recorder.num_replays == 4 * 5, "three rows fit into no graph"
    assert [result.token_ids for result in pair] == alone[:2]
    assert [result.token_ids for result in together] == alone


def test_a_replay_that_cannot_be_planned_loses_nothing_of_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: pages of a row that a failed launch of others brought along, and that never come."""
    replay_decode_steps(monkeypatch, [2])
    model = write_tiny_model(tmp_path / "qwen3", "Qwen3ForCausalLM")
    settings = settings_from_keywords(model=str(model), max_running_requests=2, page_size=4)
    engine = build_scheduler(settings, MemoryTransport(), progress=False)._engine
    assert isinstance(engine, Engine)
    chunk = np.array([(0, 0, 3, 1)], dtype=CHUNK)
    page = np.array([(0, 0, 1)], dtype=np.int32)
    first = added_rows(0)
    engine.forward_batch(
        BatchPlan(
            number=0, added=first, table_writes=page, chunks=chunk,
            token_ids=np.arange(3, 6, dtype=np.int32),
        )
    )  # fmt: skip
    second, order = added_rows(1), np.zeros(1, dtype=np.int32)
    second["temperature"] = 0.5

    def refuse(*_: object) -> None:
        raise RuntimeError("the schedule is another")

    monkeypatch.setattr(ReplayableBackend, "prepare_replay", refuse)
    with pytest.raises(RuntimeError, match="the schedule is another"):
        engine.forward_batch(
            BatchPlan(
                number=1, added=second, table_writes=np.array([(1, 0, 2)], dtype=np.int32),
                decode_rows=order, num_decode_rows=1,
            )
        )  # fmt: skip
    assert engine.state.rows.page_table[1, 0] == 2
    assert engine.state.rows.temperature[1] == 0.5


def added_rows(row: int) -> npt.NDArray[np.void]:
    added = np.zeros(1, dtype=ROW_PARAMS)
    added["row"], added["top_p"] = row, 1
    return added
