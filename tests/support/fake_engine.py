"""A deterministic engine without a model: the next token is a hash of the row's whole sequence.

The sequence is read back from a fake KV pool through the page table of the plans, so a page that
is freed, shared or overwritten by mistake changes tokens. Work is done as late as a device stream
would allow: in order, when a result is asked for, or not before the next launch. Even the packed
plans are read that late, from the staging buffers of the real engine.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import numpy.typing as npt

from minisgl.engine.controls import decode_controls
from minisgl.engine.info import EngineInfo
from minisgl.engine.plan import BatchPlan, IntArray
from minisgl.engine.plan_codec import decode_plan, encode_plan, plan_words
from minisgl.engine.reports import StepReports
from minisgl.engine.staging import PlanStager
from support.toy_grammar import allowed

VOCAB = 11
EOS = 1
_EMPTY = -1
_GARBAGE = VOCAB + 1


def next_token(sequence: list[int]) -> int:
    """The fake model."""
    return crc32(np.array(sequence, dtype=np.int32).tobytes()) % VOCAB


def generate(
    prompt: list[int],
    max_tokens: int,
    *,
    stop_ids: frozenset[int] = frozenset({EOS}),
    min_tokens: int = 0,
    grammar: str = "",
) -> list[int]:
    """What a request must get, whatever runs beside it.

    ``grammar`` is one of ``support.toy_grammar``; a text that it ends may be shorter than all else
    would make it.
    """
    sequence, output = list(prompt), []
    while len(output) < max_tokens:
        token = next_token(sequence)
        may = may_come(output, grammar, stop_ids, min_tokens)
        if not may:
            break
        while token not in may:
            token = (token + 1) % VOCAB
        output.append(token)
        sequence.append(token)
        if token in stop_ids:
            break
    return output


def may_come(
    output: list[int], grammar: str, stop_ids: frozenset[int], min_tokens: int
) -> set[int]:
    """Return the tokens that may follow ``output``."""
    may = set(range(VOCAB))
    if grammar:
        seed, length = map(int, grammar.split(":"))
        may = allowed(seed, length, output)
        if EOS not in stop_ids:
            may -= {EOS}
    return may - stop_ids if len(output) < min_tokens else may


@dataclass(slots=True)
class Part:
    """What one row feeds in a launch; ``tokens`` ``None`` means its last sampled token."""

    row: int
    start: int
    tokens: list[int] | None
    sampled: bool
    end: int = 0


class FakeResult:
    """A launched step; computed when asked for."""

    def __init__(self, engine: "FakeEngine", number: int) -> None:
        self._engine = engine
        self._number = number

    def tokens(self) -> npt.NDArray[np.int32]:
        """Let the stream run up to this step and return its tokens."""
        while self._number not in self._engine.results:
            self._engine.run_next()
        tokens = self._engine.results.pop(self._number)
        if tokens is None:
            raise RuntimeError("injected late failure")
        return tokens

    def reports(self) -> StepReports:
        """Return nothing: there are no logits."""
        return StepReports()


class FakeEngine:
    """Applies plans in order, late, and checks what it is told to write.

    Args:
        num_pages, page_size, max_seq_len, max_running_requests: its ``EngineInfo``.
        lazy: run a step when its result is asked for, not when it is launched.
        fail_at: of which plans the launch raises; they change the row state and compute nothing.
        shares: attend to prefixes that rows share once, whatever it saves.
        fail_late_at: of which plans the result raises, when later ones may be in flight; what
            they should have written is garbage.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_seq_len: int,
        max_running_requests: int,
        lazy: bool = True,
        shares: bool = False,
        fail_at: Callable[[BatchPlan], bool] = lambda plan: False,
        fail_late_at: Callable[[BatchPlan], bool] = lambda plan: False,
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
            shared_prefix_min_tokens=1 if shares else None,
        )
        self._lazy = lazy
        self._fail_at = fail_at
        self._fail_late_at = fail_late_at
        width = -(-max_seq_len // page_size)
        self._table = np.zeros((max_running_requests, width), dtype=np.int32)
        self._last = np.zeros(max_running_requests, dtype=np.int32)
        self._lengths = np.zeros(max_running_requests, dtype=np.int64)
        self._bans: dict[int, dict[int, int]] = {}
        self._masks: dict[int, set[int]] = {}
        self._order: list[int] = []
        self._shared: list[tuple[int, int]] | None = None
        self.num_shared_launches = 0
        self._kv = np.full((num_pages + 1) * page_size, _EMPTY, dtype=np.int64)
        self._stager = PlanStager()
        self._queue: deque[tuple[int, IntArray, bool]] = deque()
        self.results: dict[int, npt.NDArray[np.int32] | None] = {}
        self._late_failures: set[int] = set()
        self.plans: list[BatchPlan] = []
        self._next = 0

    def forward_batch(self, plan: BatchPlan) -> FakeResult:
        """Queue a step."""
        assert plan.number == self._next, "plans come in order"
        self._next += 1
        self.plans.append(plan)
        fails = self._fail_at(plan)
        if self._fail_late_at(plan):
            self._late_failures.add(plan.number)
        self._queue.append((plan.number, self._stager.stage(plan), fails))
        if fails:
            raise RuntimeError("injected failure")
        if not self._lazy:
            self.run_next()
        return FakeResult(self, plan.number)

    def check_alive(self) -> None:
        """It always is."""

    def close(self) -> None:
        """Nothing runs elsewhere."""

    @staticmethod
    def pack(plan: BatchPlan) -> IntArray:
        """Return a plan as packed words of its own."""
        words = np.zeros(plan_words(plan), dtype=np.int32)
        encode_plan(plan, words)
        return words

    def run_next(self) -> None:
        """Run the oldest queued step; of one that failed, only what it changed."""
        number, words, failed = self._queue.popleft()
        plan = decode_plan(words)
        assert plan.number == number, "a staging buffer was written again before its step ran"
        self._apply(plan)
        launches = self._launches(plan)
        if failed:
            return
        tokens = [token for launch in launches for token in self._launch(launch)]
        self.results[number] = np.array(tokens, dtype=np.int32)
        if number in self._late_failures:
            self.results[number] = None
            for part in (part for launch in launches for part in launch):
                for position in range(part.start, part.end):
                    self._kv[self._slot(part.row, position)] = _GARBAGE * 1000 + position

    def _apply(self, plan: BatchPlan) -> None:
        for added in plan.added:
            row = int(added["row"])
            self._bans[row] = {}
        for record, _ in decode_controls(plan.controls):
            until = record.bias_until.tolist()
            self._bans[record.row] = dict(zip(record.bias_tokens.tolist(), until, strict=True))
        keys = [(row, column) for row, column, _ in plan.table_writes.tolist()]
        assert len(set(keys)) == len(keys), "a table entry is written twice in one plan"
        for row, column, page in plan.table_writes.tolist():
            assert 1 <= page <= self.info.num_pages, "a page outside the pool"
            self._table[row, column] = page
        if plan.decode_rows is not None:
            self._order = plan.decode_rows.tolist()
            self._shared = None
        if len(plan.shared_groups):
            assert self.info.shared_prefix_min_tokens is not None, "nobody asked for groups"
            assert len(plan.shared_groups) == len(self._order), "every decode row has its group"
            self._shared = [
                (group, int(plan.shared_tokens[group]) if group >= 0 else 0)
                for group in plan.shared_groups.tolist()
            ]
        self._masks = {
            row: {token for token in range(VOCAB) if int(mask[0]) >> token & 1}
            for row, mask in zip(plan.mask_rows.tolist(), plan.masks, strict=True)
        }

    def _launches(self, plan: BatchPlan) -> list[list[Part]]:
        """Return what each launch feeds, and advance the rows' lengths."""
        decode, chunks, first = [], [], 0
        if plan.num_decode_rows:
            assert plan.num_decode_rows == len(self._order), "all decode rows run, or none does"
            for row in self._order:
                decode.append(Part(row, int(self._lengths[row]), None, sampled=True))
                self._lengths[row] += 1
        for row, start, length, sampled in plan.chunks.tolist():
            tokens = plan.token_ids[first : first + length].tolist()
            first += length
            chunks.append(Part(row, start, tokens, sampled=bool(sampled)))
            self._lengths[row] = start + length
        assert first == len(plan.token_ids)
        launches = [decode + chunks] if plan.mixed else [decode, chunks]
        return [launch for launch in launches if launch]

    def _launch(self, parts: list[Part]) -> list[int]:
        rows, size, written = [part.row for part in parts], self.info.page_size, set()
        assert len(set(rows)) == len(rows), "a row is launched twice"
        for part in parts:
            tokens = [int(self._last[part.row])] if part.tokens is None else part.tokens
            part.end = part.start + len(tokens)
            for position, token in enumerate(tokens, part.start):
                slot = self._slot(part.row, position)
                assert slot >= size, "a real row writes to the dummy page"
                assert slot not in written, "two rows write to one slot"
                written.add(slot)
                self._kv[slot] = token * 1000 + position
        prefixes, sampled = self._prefixes(parts), []
        for part in parts:
            row = part.row
            sequence = [
                self._read(*prefixes.get((row, position), (row, position)))
                for position in range(part.end)
            ]
            if part.sampled:
                token = next_token(sequence)
                banned = {ban for ban, end in self._bans[row].items() if part.end < end}
                may = self._masks.get(row, set(range(VOCAB))) - banned
                assert may, "no token may come"
                while token not in may:
                    token = (token + 1) % VOCAB
                sampled.append(token)
                self._last[row] = token
        return sampled

    def _prefixes(self, parts: list[Part]) -> dict[tuple[int, int], tuple[int, int]]:
        """Return where to read what rows share: all of a group, from its first row's pages."""
        if self._shared is None or parts[-1].tokens is not None:
            return {}
        self.num_shared_launches += 1
        first: dict[int, int] = {}
        places = {}
        for part, (group, num_tokens) in zip(parts, self._shared, strict=True):
            if group < 0:
                continue
            assert num_tokens < part.end, "a row has tokens of its own"
            assert num_tokens % self.info.page_size == 0, "a part page"
            leader = first.setdefault(group, part.row)
            columns = num_tokens // self.info.page_size
            pages = self._table[[leader, part.row], :columns]
            assert (pages[0] == pages[1]).all(), "rows of a group have other pages"
            for position in range(num_tokens):
                places[part.row, position] = (leader, position)
        members = [group for group, _ in self._shared if group >= 0]
        assert all(members.count(group) > 1 for group in members), "a group of one row"
        assert members, "groups without a row"
        return places

    def _slot(self, row: int, position: int) -> int:
        size = self.info.page_size
        return int(self._table[row, position // size]) * size + position % size

    def _read(self, row: int, position: int) -> int:
        token, stored_position = divmod(int(self._kv[self._slot(row, position)]), 1000)
        assert stored_position == position, "a page holds another position's K and V"
        return token
