"""Rows that share a cached prefix, through scheduler, plan and engine: the tokens stay the same.

The backend here attends as the reference does, but finds shared prefixes by what it is told alone.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.attention.batch import Batch
from minisgl.scheduler import sharing
from support.replays import ReplayableBackend, replay_decode_steps
from support.tiny_models import write_tiny_model

PREFIXES = [list(range(3, 43)), [50, 60, 70, 80] * 7]
PROMPTS = [
    *([*PREFIXES[0], 100 + place] for place in range(5)),
    *([*PREFIXES[1], 100 + place, 7] for place in range(3)),
    [9, 8, 7],
]


class ByLeader(ReplayableBackend):
    """Reads what rows share through the page table of their group's first row."""

    takes_shared_prefixes = True
    num_shared = 0

    def plan(self, batch: Batch, slot: int) -> Any:
        if batch.shared is None:
            return super().plan(batch, slot)
        table, rows = batch.page_table.clone(), batch.rows.tolist()
        members, starts = batch.shared.members.tolist(), batch.shared.starts.tolist()
        expected = [0] * len(starts)
        for first, count, num_tokens in batch.shared.groups.tolist():
            for place in members[first : first + count]:
                columns = num_tokens // batch.page_size
                table[rows[place], :columns] = table[rows[members[first]], :columns]
                expected[place] = num_tokens
            ByLeader.num_shared += count > 1
        assert starts == expected
        return super().plan(replace(batch, page_table=table, shared=None), slot)

    def enqueue(self, batch: Batch, plan: Any) -> None:
        assert plan.kv_lens.tolist() == batch.kv_lens_device.tolist(), "host and device differ"
        plan.inner = self.plan(replace(batch, kv_lens=plan.kv_lens), 0)


def outputs(path: Path, **settings: Any) -> list[list[int]]:
    """Generate in two batches, the second of which finds the prefixes in the cache."""
    found = []
    params = [
        SamplingParams(temperature=place % 2, seed=place, max_tokens=14 + place, ignore_eos=True)
        for place in range(len(PROMPTS))
    ]
    with LLM(str(path), progress=False, page_size=4, num_pages=400, **settings) as llm:
        for order in (range(len(PROMPTS)), range(len(PROMPTS) - 1, -1, -1)):
            results = llm.generate(
                [PROMPTS[place] for place in order], [params[place] for place in order],
                progress=False,
            )  # fmt: skip
            found += [results[order.index(place)].token_ids for place in range(len(PROMPTS))]
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return outputs(model, attention={"shared_prefix_mib": 0})


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("rows", [3, 16])
def test_tokens_are_those_without_sharing(
    model: Path,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    rows: int,
    overlap: str,
    replays: bool,
) -> None:
    """Catches: groups by row where places are meant, groups of an earlier order, a stale buffer."""
    if replays:
        replay_decode_steps(monkeypatch, [1, 2, rows], shared_sizes=[2, rows])
    monkeypatch.setattr("minisgl.attention.torch_backend.TorchAttentionBackend", ByLeader)
    monkeypatch.setattr(sharing, "_STEPS_BETWEEN_LOOKS", 2)
    ByLeader.num_shared = 0
    found = outputs(
        model, max_running_requests=rows, attention={"shared_prefix_mib": 1e-6},
        scheduler={"overlap": overlap, "launch": "split"},
    )  # fmt: skip
    assert found == expected
    assert ByLeader.num_shared > 10, "nothing was shared"


def test_nobody_is_told_of_groups_if_the_setting_is_0(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.attention.torch_backend.TorchAttentionBackend", ByLeader)
    ByLeader.num_shared = 0
    outputs(model, attention={"shared_prefix_mib": 0})
    with LLM(str(model), progress=False, attention={"shared_prefix_mib": 0}) as llm:
        assert llm.engine.info.shared_prefix_min_tokens is None
    with LLM(str(model), progress=False, attention={"shared_prefix_mib": 1}) as llm:
        bytes_a_token = 2 * 2 * 8 * 4  # K and V of two heads of 8 in float32
        assert llm.engine.info.shared_prefix_min_tokens == 2**20 / bytes_a_token
    assert not ByLeader.num_shared
