"""Torch references of penalties, biases, bans and masks against loops over tokens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl.engine.control_state import ControlState
from minisgl.engine.controls import FOREVER, RowControls, decode_controls, encode_controls
from minisgl.kernel.controls import MIN_LOGPROB, token_logprobs
from minisgl.kernel.ops import OpTable

VOCAB = 37
OPS = OpTable()
INF = float("inf")


def ints(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def state_of(records: list[RowControls]) -> ControlState:
    state = ControlState(len(records), VOCAB, 1, torch.device("cpu"))
    words = encode_controls(records)
    for record, at in decode_controls(words):
        state.set_row(record, torch.from_numpy(words), at)
    return state


def some_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 4


ENTRIES = st.tuples(
    st.integers(0, VOCAB - 1), st.sampled_from([-INF, -2.5, 7.0]), st.integers(0, 6)
)


@given(
    st.lists(
        st.lists(
            ENTRIES,
            max_size=6,
            unique_by=lambda entry: entry[0],
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 6),
)  # fmt: skip
def test_a_bias_counts_below_its_length_and_not_at_it(
    rows: list[list[tuple[int, float, int]]], length: int
) -> None:
    records = [
        RowControls(
            row=row,
            bias_tokens=ints([token for token, _, _ in entries]),
            bias_values=np.array([value for _, value, _ in entries], dtype=np.float32),
            bias_until=ints([until or FOREVER for _, _, until in entries]),
        )
        for row, entries in enumerate(rows)
    ]
    found = some_logits(len(rows))
    expected = found.clone()
    for row, entries in enumerate(rows):
        for token, value, until in entries:
            if not until or length < until:
                expected[row, token] += value
    lengths = torch.full((len(rows),), length)
    most = max(len(entries) for entries in rows)
    OPS.bias_logits(found, torch.arange(len(rows)), lengths, state_of(records).tensors, most)
    assert torch.equal(found, expected)


@given(st.sets(st.integers(0, VOCAB - 1), min_size=1))
def test_only_allowed_tokens_are_left(allowed: set[int]) -> None:
    bits = np.zeros(64, dtype=np.bool_)
    bits[list(allowed)] = True
    words = np.packbits(bits, bitorder="little").view(np.int32)
    records = [RowControls(row=0, allowed=words), RowControls(row=1, presence=1)]
    found = some_logits(2)
    expected = found.clone()
    expected[0, [token for token in range(VOCAB) if token not in allowed]] = -INF
    OPS.mask_logits(found, torch.tensor([0, 1]), state_of(records).tensors)
    assert torch.equal(found, expected)


SEQUENCES = st.lists(
    st.lists(st.integers(0, 3), min_size=2, max_size=4).map(tuple), min_size=1, max_size=5
)


@given(SEQUENCES, st.lists(st.integers(0, 3), max_size=6))
def test_a_sequence_is_banned_where_all_but_its_last_token_is_there(
    sequences: list[tuple[int, ...]], output: list[int]
) -> None:
    length = max(len(one) for one in sequences) - 1
    prefixes = [[-1] * (length - len(one) + 1) + list(one[:-1]) for one in sequences]
    record = RowControls(
        row=0,
        bad_prefixes=ints(prefixes).reshape(len(sequences), length),
        bad_lasts=ints([one[-1] for one in sequences]),
        output=ints(output),
    )
    found = some_logits(1)
    expected = found.clone()
    for *before, last in sequences:
        if output[-len(before) :] == before:
            expected[0, last] = -INF
    OPS.ban_sequences(found, torch.tensor([0]), state_of([record]).tensors, len(sequences), length)
    assert torch.equal(found, expected)


@given(
    st.lists(st.integers(0, VOCAB - 1), max_size=9),
    st.lists(st.integers(0, VOCAB - 1), max_size=9),
    st.floats(-2, 2, width=32),
    st.floats(-2, 2, width=32),
    st.floats(0.0625, 4, width=32),
)
def test_penalties_are_those_of_their_papers_and_of_openai(
    prompt: list[int], output: list[int], presence: float, frequency: float, repetition: float
) -> None:
    record = RowControls(
        row=0,
        presence=presence,
        frequency=frequency,
        repetition=repetition,
        prompt=ints(prompt),
        output=ints(output),
    )
    found = some_logits(1)
    found[0, 3] = -INF  # what is banned stays so
    expected = []
    for token, value in enumerate(found[0].tolist()):
        logit = value
        if token in prompt or token in output:
            logit = logit / repetition if logit > 0 else logit * repetition
        logit -= frequency * output.count(token) + presence * (token in output)
        expected.append(logit)
    OPS.penalize(found, torch.tensor([0]), state_of([record]).tensors)
    assert torch.allclose(found[0].double(), torch.tensor(expected, dtype=torch.double), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_finite_ranked_and_sorted_with_equals_by_id(dtype: torch.dtype) -> None:
    logits = torch.full((3, VOCAB), -INF, dtype=dtype)
    logits[0, [9, 4, 30]] = torch.tensor([1.0, 1.0, 2.0], dtype=dtype)
    logits[1] = 0.0
    logits[2] = math.nan
    found = token_logprobs(logits, torch.tensor([9, 5, 1]), 4)
    total = math.log(2 * math.e + math.e**2)
    assert found.top_ids[0, :3].tolist() == [30, 4, 9]
    assert torch.allclose(found.chosen[:2], torch.tensor([1 - total, -math.log(VOCAB)]))
    assert found.ranks.tolist()[:2] == [2, 1]
    assert found.top_values[0, 3] == MIN_LOGPROB
    assert found.top_ids[1].tolist() == sorted(found.top_ids[1].tolist())
    for numbers in (found.chosen, found.top_values):
        assert torch.isfinite(numbers).all()
        assert (numbers >= MIN_LOGPROB).all()
    assert token_logprobs(logits, torch.tensor([9, 5, 1]), 0).top_ids.shape == (3, 0)
    assert token_logprobs(logits, torch.tensor([9, 5, 1]), 99).top_ids.shape == (3, VOCAB)


@pytest.mark.parametrize("known", [True, False], ids=["looked up", "not looked up"])
@pytest.mark.parametrize("vocab", [20, 263, 5000])
@pytest.mark.parametrize("num_top", [1, 3, 20])
def test_of_equal_tokens_those_with_the_lowest_ids_are_reported(
    vocab: int, num_top: int, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: whichever of them a partial sort happens to leave among the first, as on a GPU."""
    if not known:  # nothing can be looked up there without waiting
        monkeypatch.setattr("minisgl.kernel.controls.is_true", lambda _: False)
    random = torch.Generator().manual_seed(vocab + num_top)
    few = torch.randint(0, 4, (20, vocab), generator=random).bfloat16()
    coarse = torch.randn(20, vocab, generator=random).bfloat16()
    barred = coarse.masked_fill(torch.rand(20, vocab, generator=random) < 0.99, -INF)
    one = torch.zeros(1, vocab).index_fill_(1, torch.tensor([vocab - 1]), 5)
    for logits in (few, coarse, barred, one, torch.full((1, vocab), math.nan)):
        found = token_logprobs(logits, torch.zeros(len(logits), dtype=torch.int64), num_top)
        order = logits.float().nan_to_num(nan=0).sort(dim=-1, descending=True, stable=True)
        assert torch.equal(found.top_ids, order.indices[:, :num_top].int())


def test_logits_of_more_tokens_than_there_is_state_for_are_refused() -> None:
    """Catches: what lies behind it in memory is taken for counts and bits of the last tokens."""
    state, rows = state_of([RowControls(row=0, presence=1)]).tensors, torch.tensor([0])
    wide = torch.zeros(1, 65)
    with pytest.raises(ValueError, match=r"count 37 tokens, but the logits have 65: .*vocab_size"):
        OPS.penalize(wide, rows, state)
    with pytest.raises(ValueError, match=r"2 words hold 64 tokens, .* 65: .* must have 3 words"):
        OPS.mask_logits(wide, rows, state)
    OPS.mask_logits(wide[:, :64], rows, state)
