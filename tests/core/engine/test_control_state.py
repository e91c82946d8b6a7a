"""What a row keeps for its penalties and bans is a recount of its tokens, whatever happens."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl.engine.control_state import ControlState, control_bytes
from minisgl.engine.controls import (
    FOREVER,
    RowControls,
    SectionSlices,
    decode_controls,
    encode_controls,
)
from minisgl.kernel.controls import note_tokens
from minisgl.request import MAX_BAD_TOKENS

VOCAB, ROWS, RECENT = 40, 4, MAX_BAD_TOKENS - 1
TOKENS = st.integers(0, VOCAB - 1)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@dataclass
class Owner:
    """What a row must know, kept as plain lists."""

    prompt: list[int]
    repeats: bool
    output: list[int] = field(default_factory=list)

    def record(self, row: int) -> RowControls:
        return RowControls(
            row=row,
            frequency=0.5,
            repetition=1.5 if self.repeats else 1.0,
            bad_prefixes=ints(3).reshape(1, 1),
            bad_lasts=ints(4),
            prompt=ints(*self.prompt) if self.repeats else ints(),
            output=ints(*self.output),
        )

    def counts(self) -> list[int]:
        in_prompt = set(self.prompt) if self.repeats else set()
        return [2 * self.output.count(token) + (token in in_prompt) for token in range(VOCAB)]

    def recent(self) -> list[int]:
        return ([-1] * RECENT + self.output)[-RECENT:]


def admit(state: ControlState, owners: dict[int, Owner], rows: list[int]) -> None:
    """Give rows to their owners, all in one plan."""
    words = encode_controls([owners[row].record(row) for row in rows])
    for record, at in decode_controls(words):
        state.set_row(record, torch.from_numpy(words), at)


@st.composite
def events(draw: st.DrawFn) -> list[tuple[str, object]]:
    prompt = st.tuples(st.lists(TOKENS, min_size=1, max_size=12), st.booleans())
    rows = st.sets(st.integers(0, ROWS - 1), min_size=1)
    one = st.one_of(
        st.tuples(st.just("add"), st.dictionaries(st.integers(0, ROWS - 1), prompt, min_size=1)),
        st.tuples(st.just("accept"), st.tuples(rows, st.lists(TOKENS, min_size=4, max_size=4))),
        st.tuples(st.just("accept"), st.tuples(rows, st.lists(TOKENS, min_size=4, max_size=4))),
        st.tuples(st.just("retract"), st.tuples(st.integers(0, 3), st.integers(0, 3))),
    )
    found: list[tuple[str, object]] = draw(st.lists(one, max_size=30))
    return found


@given(events())
def test_counts_are_a_recount_whatever_happens(some: list[tuple[str, object]]) -> None:
    """Requests come, get tokens, lose their row to others and get another one.

    Catches: counts of the last owner, of a prompt that is none of its business, or twice.
    """
    state = ControlState(ROWS, VOCAB, 1, torch.device("cpu"))
    owners: dict[int, Owner] = {}
    for kind, what in some:
        if kind == "add":
            assert isinstance(what, dict)
            for row, (prompt, repeats) in what.items():
                owners[row] = Owner(prompt, repeats)
            admit(state, owners, list(what))
        elif kind == "accept":
            assert isinstance(what, tuple)
            rows = sorted(row for row in what[0] if row in owners)
            tokens = what[1][: len(rows)]
            if rows:
                note_tokens(torch.tensor(rows), torch.tensor(tokens), state.tensors)
            for row, token in zip(rows, tokens, strict=True):
                owners[row].output.append(token)
        else:
            assert isinstance(what, tuple)
            old, new = what
            if old in owners and new not in owners:
                owners[new] = owners.pop(old)
                admit(state, owners, [new])
        for row, owner in owners.items():
            assert state.tensors.counts[row].tolist() == owner.counts()
            assert state.tensors.recent[row].tolist() == owner.recent()


def test_a_row_keeps_nothing_of_its_last_owner() -> None:
    """Catches: a bias, a banned sequence or a mask that the next request never asked for."""
    state = ControlState(ROWS, VOCAB, 1, torch.device("cpu"))
    greedy = RowControls(
        row=1,
        presence=1,
        bias_tokens=ints(5, 6),
        bias_until=ints(FOREVER, 3),
        bias_values=np.array([2, -np.inf], dtype=np.float32),
        bad_prefixes=ints(-1, 1, 2, 3).reshape(2, 2),
        bad_lasts=ints(8, 9),
        allowed=ints(0, 3),
    )
    for record in (greedy, RowControls(row=1, logprobs=0)):
        words = encode_controls([record])
        ((decoded, at),) = decode_controls(words)
        assert isinstance(at, SectionSlices)
        state.set_row(decoded, torch.from_numpy(words), at)
    tensors = state.tensors
    assert not tensors.bias_values[1].any()
    assert (tensors.bad_lasts[1] == -1).all()
    assert (tensors.allowed[1] == -1).all()
    assert torch.stack([x[1] for x in tensors[2:5]]).tolist() == [0, 0, 1]


def test_bits_of_another_vocabulary_are_refused() -> None:
    """Catches: a single word that is taken for each of the row's words."""
    state = ControlState(ROWS, VOCAB, 1, torch.device("cpu"))
    words = encode_controls([RowControls(row=1, allowed=ints(7))])
    ((record, at),) = decode_controls(words)
    with pytest.raises(ValueError, match=r"row 1 brings 1 words of allowed .* vocabulary has 2"):
        state.set_row(record, torch.from_numpy(words), at)


def test_the_memory_plan_knows_what_it_takes() -> None:
    state = ControlState(ROWS, VOCAB, 3, torch.device("cpu"))
    assert control_bytes(ROWS, VOCAB, 3) == sum(tensor.nbytes for tensor in state.tensors)
