"""How the steps between model and sampler cut their work."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.engine import logits as module
from minisgl.engine.controls import FOREVER, RowControls, encode_controls
from minisgl.engine.info import EngineInfo
from minisgl.engine.logits import LogitsProcessing, SampledRows
from minisgl.engine.plan import ROW_PARAMS, BatchPlan
from minisgl.kernel.controls import TokenLogprobs
from minisgl.kernel.ops import OpTable

NUM_ROWS, VOCAB = 50, 999


def info() -> EngineInfo:
    return EngineInfo(
        architecture="None", device="cpu", dtype="float32", vocab_size=VOCAB, eos_token_ids=(0,),
        max_seq_len=64, max_running_requests=NUM_ROWS, page_size=4, num_pages=1,
        mixed_launches=False, asynchronous=False,
    )  # fmt: skip


class NotingOps:
    """Notes where the tensors of each call begin, and how many rows they have."""

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}
        self.places: list[int] = []

    def table(self) -> OpTable:
        names = ("mask_logits", "bias_logits", "ban_sequences", "penalize", "token_logprobs")
        ops = OpTable()
        return replace(ops, **{name: self._noting(name, getattr(ops, name)) for name in names})

    def _noting(self, name: str, op: Any) -> Any:
        def noted(*arguments: Any) -> TokenLogprobs | None:
            tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
            self.rows.setdefault(name, []).append(len(tensors[0]))
            self.places += [tensor.data_ptr() % 16 for tensor in tensors]
            found: TokenLogprobs | None = op(*arguments)
            return found

        return noted


@pytest.mark.parametrize(("at_once", "expected"), [(1, [16] * 3 + [2]), (47, [32, 18]), (99, [50])])
def test_pieces_begin_where_a_kernel_has_been_compiled_for(
    at_once: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: row 17 of 999 logits each, at which no access of 16 bytes may begin.

    For such memory Triton compiles a kernel again, at the first step of so many rows.
    """
    monkeypatch.setattr(module, "_PIECE", at_once * VOCAB)
    ops = NotingOps()
    processing = LogitsProcessing(info(), torch.device("cpu"), ops.table())
    one = np.ones(1, dtype=np.int32)
    records = [
        RowControls(
            row=row, presence=1, logprobs=2, bias_tokens=one, bias_until=one * FOREVER,
            bias_values=np.ones(1, dtype=np.float32), bad_prefixes=one.reshape(1, 1),
            bad_lasts=one, allowed=np.full(32, -1, dtype=np.int32),
        )
        for row in range(NUM_ROWS)
    ]  # fmt: skip
    added = np.zeros(NUM_ROWS, dtype=ROW_PARAMS)
    added["row"] = np.arange(NUM_ROWS)
    plan = BatchPlan(number=0, added=added, controls=encode_controls(records))
    processing.receive(plan, torch.from_numpy(plan.controls))
    rows = np.arange(NUM_ROWS)
    sampled = SampledRows(
        rows=torch.arange(NUM_ROWS), lengths=torch.full((NUM_ROWS,), 5),
        host_rows=rows, ends=np.full(NUM_ROWS, 5), places=rows,
    )  # fmt: skip
    changed = processing.change(torch.zeros(NUM_ROWS, VOCAB), sampled)
    assert changed is not None
    assert changed.places.tolist() == rows.tolist()
    processing.accept(torch.zeros(NUM_ROWS, dtype=torch.int64), sampled)
    assert ops.rows == dict.fromkeys(ops.rows, expected)
    assert len(ops.rows) == 5
    assert set(ops.places) == {0}
