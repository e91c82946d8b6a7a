"""A deterministic engine without a model: the next token is a hash of the row's whole sequence.

The sequence is read back from a fake KV pool through the page table of the plans, so a page that
is freed, shared or overwritten by mistake changes tokens. Work is done as late as a device stream
would allow: in order, when a result is asked for, or not before the next launch.
"""

from collections import deque
from collections.abc import Callable
from zlib import crc32

import numpy as np
import numpy.typing as npt

from minisgl.engine.engine import EngineInfo
from minisgl.engine.plan import BatchPlan, LaunchPlan

VOCAB = 11
EOS = 1
_EMPTY = -1


def next_token(sequence: list[int]) -> int:
    """The fake model."""
    return crc32(np.array(sequence, dtype=np.int32).tobytes()) % VOCAB


def generate(
    prompt: list[int],
    max_tokens: int,
    *,
    stop_ids: frozenset[int] = frozenset({EOS}),
    min_tokens: int = 0,
) -> list[int]:
    """What a request must get, whatever runs beside it."""
    sequence, output = list(prompt), []
    while len(output) < max_tokens:
        token = next_token(sequence)
        if len(output) < min_tokens:
            while token in stop_ids:
                token = (token + 1) % VOCAB
        output.append(token)
        sequence.append(token)
        if token in stop_ids:
            break
    return output


class FakeResult:
    """A launched step; computed when asked for."""

    def __init__(self, engine: "FakeEngine", number: int) -> None:
        self._engine = engine
        self._number = number

    def tokens(self) -> list[npt.NDArray[np.int32]]:
        """Let the stream run up to this step and return its tokens."""
        while self._number not in self._engine.results:
            self._engine.run_next()
        return self._engine.results.pop(self._number)


class FakeEngine:
    """Applies plans in order, late, and checks what it is told to write."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_seq_len: int,
        max_running_requests: int,
        lazy: bool = True,
        fail_at: Callable[[BatchPlan], bool] = lambda plan: False,
    ) -> None:
        self.info = EngineInfo(
            architecture="Fake",
            device="cpu",
            dtype="float32",
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            max_seq_len=max_seq_len,
            max_running_requests=max_running_requests,
            page_size=page_size,
            num_pages=num_pages,
            mixed_launches=True,
            asynchronous=True,
        )
        self._lazy = lazy
        self._fail_at = fail_at
        width = -(-max_seq_len // page_size)
        self._table = np.zeros((max_running_requests, width), dtype=np.int32)
        self._last = np.zeros(max_running_requests, dtype=np.int32)
        self._kv = np.full((num_pages + 1) * page_size, _EMPTY, dtype=np.int64)
        self._queue: deque[BatchPlan] = deque()
        self.results: dict[int, list[npt.NDArray[np.int32]]] = {}
        self.plans: list[BatchPlan] = []
        self._next = 0

    def forward_batch(self, plan: BatchPlan) -> FakeResult:
        """Queue a step."""
        assert plan.number == self._next, "plans come in order"
        self._next += 1
        self.plans.append(plan)
        if self._fail_at(plan):
            self._apply(plan)
            raise RuntimeError("injected failure")
        self._queue.append(plan)
        if not self._lazy:
            self.run_next()
        return FakeResult(self, plan.number)

    def run_next(self) -> None:
        """Run the oldest queued step."""
        plan = self._queue.popleft()
        self._apply(plan)
        self.results[plan.number] = [self._launch(launch) for launch in plan.launches]

    def _apply(self, plan: BatchPlan) -> None:
        while self._queue and self._queue[0].number < plan.number:
            self.run_next()
        keys = [(row, column) for row, column, _ in plan.table_writes.tolist()]
        assert len(set(keys)) == len(keys), "a table entry is written twice in one plan"
        for row, column, page in plan.table_writes.tolist():
            assert 1 <= page <= self.info.num_pages, "a page outside the pool"
            self._table[row, column] = page

    def _launch(self, launch: LaunchPlan) -> npt.NDArray[np.int32]:
        rows, size = launch.rows.tolist(), self.info.page_size
        assert len(set(rows)) == len(rows), "a row is launched twice"
        first, written, inputs = 0, set(), []
        for place, row in enumerate(rows):
            if place < launch.num_decode_rows:
                tokens = [int(self._last[row])]
                assert launch.query_lens[place] == 1
            else:
                tokens = launch.token_ids[first : first + launch.query_lens[place]].tolist()
                first += len(tokens)
            inputs.append(tokens)
            for position, token in enumerate(tokens, int(launch.starts[place])):
                slot = int(self._table[row, position // size]) * size + position % size
                assert slot >= size, "a real row writes to the dummy page"
                assert slot not in written, "two rows write to one slot"
                written.add(slot)
                self._kv[slot] = token * 1000 + position
        sampled = []
        for place, row in enumerate(rows):
            length = int(launch.starts[place] + launch.query_lens[place])
            sequence = [self._read(row, position) for position in range(length)]
            if launch.sampled[place]:
                token = next_token(sequence)
                for banned_place, ids in launch.banned:
                    if banned_place == len(sampled):
                        while token in ids:
                            token = (token + 1) % VOCAB
                sampled.append(token)
                self._last[row] = token
        assert len(inputs) == len(rows)
        return np.array(sampled, dtype=np.int32)

    def _read(self, row: int, position: int) -> int:
        size = self.info.page_size
        slot = int(self._table[row, position // size]) * size + position % size
        token, stored_position = divmod(int(self._kv[slot]), 1000)
        assert stored_position == position, "a page holds another position's K and V"
        return token
