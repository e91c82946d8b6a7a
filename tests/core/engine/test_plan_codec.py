"""A plan survives packing, and a staging buffer is left alone while its step is in flight."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.engine.plan import CHUNK, NO_MASKS, NO_TOKENS, ROW_PARAMS, BatchPlan
from minisgl.engine.plan_codec import PlanLayout, decode_plan, encode_plan, plan_words
from minisgl.engine.staging import DEPTH, PlanStager, usual_words

INT32 = st.integers(-(2**31), 2**31 - 1)


def records(dtype: np.dtype, fields: dict[str, st.SearchStrategy]) -> st.SearchStrategy:
    row = st.tuples(*(fields.get(name, st.integers(0, 2**31 - 1)) for name in dtype.names or ()))
    return st.lists(row, max_size=5).map(lambda rows: np.array(rows, dtype=dtype))


def ints(width: int | None = None, height: int | None = None) -> st.SearchStrategy:
    if width is None:
        return st.lists(INT32, max_size=9).map(lambda x: np.array(x, dtype=np.int32))
    row = st.lists(INT32, min_size=width, max_size=width)
    rows = st.lists(row, min_size=height or 0, max_size=6 if height is None else height)
    return rows.map(lambda x: np.array(x, dtype=np.int32).reshape(-1, width))


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    reals = st.floats(0, 100, width=32)
    rows, groups = draw(ints()), draw(ints())
    added = records(
        ROW_PARAMS,
        {
            "seed": st.integers(0, 2**63 - 1),
            **dict.fromkeys(("temperature", "top_p", "min_p"), reals),
        },
    )
    return BatchPlan(
        number=draw(st.integers(0, 2**40)),
        added=draw(added),
        controls=draw(ints()),
        table_writes=draw(ints(3)),
        decode_rows=draw(st.none() | ints()),
        num_decode_rows=draw(st.integers(0, 2**31 - 1)),
        chunks=draw(records(CHUNK, {})),
        token_ids=draw(ints()),
        mixed=draw(st.booleans()),
        shared_groups=groups,
        shared_tokens=draw(ints()) if len(groups) else NO_TOKENS,
        mask_rows=rows,
        masks=draw(ints(draw(st.integers(1, 4)), len(rows))) if len(rows) else NO_MASKS,
    )


def equal(a: BatchPlan, b: BatchPlan) -> bool:
    same = [
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in (
            "added",
            "controls",
            "table_writes",
            "chunks",
            "token_ids",
            "shared_groups",
            "shared_tokens",
            "mask_rows",
            "masks",
        )
    ]
    orders = [None if x.decode_rows is None else x.decode_rows.tolist() for x in (a, b)]
    rest = (a.number, a.num_decode_rows, a.mixed) == (b.number, b.num_decode_rows, b.mixed)
    return all(same) and orders[0] == orders[1] and rest


@given(plans(), st.integers(0, 5))
def test_a_packed_plan_is_the_plan(plan: BatchPlan, spare: int) -> None:
    """Catches: a section that starts a word late, an order of no rows taken for no change."""
    words = np.full(plan_words(plan) + spare, -1, dtype=np.int32)
    used = encode_plan(plan, words)
    assert used == plan_words(plan)
    assert (words[used:] == -1).all(), "more was written than was said"
    assert PlanLayout.of(words).masks.stop == used
    assert equal(decode_plan(words[:used]), plan)


@given(st.lists(st.tuples(ints(), ints(3)), min_size=DEPTH, max_size=4 * DEPTH))
def test_a_staged_plan_stays_while_its_step_is_in_flight(
    some: list[tuple[np.ndarray, np.ndarray]],
) -> None:
    """Catches: one staging buffer for all steps, which a late device reads after the next plan."""
    stager = PlanStager()
    numbered = [
        BatchPlan(number=number, token_ids=token_ids, table_writes=table_writes)
        for number, (token_ids, table_writes) in enumerate(some)
    ]
    staged = []
    for plan in numbered:
        staged.append(stager.stage(plan))
        for older, words in list(zip(numbered, staged, strict=False))[-DEPTH:]:
            assert equal(decode_plan(words), older)


@pytest.mark.parametrize("num_tokens", [10, 1 << 14, 100_000])
def test_a_plan_larger_than_the_buffer_gets_a_larger_one(num_tokens: int) -> None:
    stager = PlanStager()
    plan = BatchPlan(number=4, token_ids=np.arange(num_tokens, dtype=np.int32))
    assert equal(decode_plan(stager.stage(plan)), plan)
    small = BatchPlan(number=5)
    assert equal(decode_plan(stager.stage(small)), small)


def test_usual_plans_find_buffers_that_are_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: page-locked memory that is allocated as the first grammars come.

    A whole budget of prompt tokens in fresh pages, every row new, and a mask for each of them.
    """
    num_rows, vocab_size = 64, 151_936
    stager = PlanStager(usual_words(num_rows, vocab_size))
    monkeypatch.setattr(stager, "_allocate", lambda _: pytest.fail("it allocates"))
    rows = np.arange(num_rows, dtype=np.int32)
    for number in range(2 * DEPTH):
        plan = BatchPlan(
            number=number,
            added=np.zeros(num_rows, dtype=ROW_PARAMS),
            table_writes=np.zeros((8192, 3), dtype=np.int32),
            decode_rows=rows,
            chunks=np.zeros(num_rows, dtype=CHUNK),
            token_ids=np.arange(8192, dtype=np.int32),
            mask_rows=rows,
            masks=np.full((num_rows, 4748), -1, dtype=np.int32),
        )
        assert equal(decode_plan(stager.stage(plan)), plan)


def test_a_decode_step_to_which_nothing_happened_is_a_few_words() -> None:
    assert plan_words(BatchPlan(number=7, num_decode_rows=1024)) == 10
