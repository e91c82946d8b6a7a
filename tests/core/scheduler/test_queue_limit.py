"""How many prompt tokens may wait; what waits is counted, and what does not is not."""

from hypothesis import given
from hypothesis import strategies as st

from minisgl.request import GrammarSpec
from support.scheduling import Harness
from support.toy_grammar import InlineCompiler

PROMPT = [2, 3, 4, 5]


def outcomes(harness: Harness) -> dict[int, list[str]]:
    return {uid: client.reasons for uid, client in harness.clients.items()}


def test_prompts_beyond_the_limit_are_refused_and_the_others_served() -> None:
    harness = Harness(rows=1, max_queued_tokens=8)
    for uid in range(5):
        harness.submit(uid, PROMPT, max_tokens=3)
    harness.scheduler.receive(0)
    assert harness.scheduler.num_queued_tokens == 8
    harness.finish()
    assert outcomes(harness) == {0: ["length"], 1: ["length"]} | {n: ["error"] for n in (2, 3, 4)}
    assert "8 prompt tokens wait, 4 more are over its limit of 8" in harness.clients[2].failures[0]


def test_there_is_room_again_once_a_prompt_has_its_row() -> None:
    harness = Harness(rows=1, max_queued_tokens=4)
    harness.submit(0, PROMPT, max_tokens=3)
    harness.step()
    harness.submit(1, PROMPT, max_tokens=3)
    harness.submit(2, PROMPT, max_tokens=3)
    harness.finish()
    assert outcomes(harness) == {0: ["length"], 1: ["length"], 2: ["error"]}


def test_a_prompt_longer_than_the_limit_is_served_when_nothing_waits() -> None:
    harness = Harness(rows=1, max_queued_tokens=2)
    harness.submit(0, PROMPT, max_tokens=3)
    harness.finish()
    assert outcomes(harness) == {0: ["length"]}


@given(
    st.lists(
        st.tuples(
            st.integers(1, 12),  # tokens of the prompt
            st.booleans(),  # it waits for a grammar
            st.integers(0, 6),  # steps until its client leaves; 0: never
        ),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 3),
    st.integers(4, 12),
    st.integers(1, 30),
)
def test_the_queue_never_holds_more_and_ends_empty(
    asked: list[tuple[int, bool, int]], rows: int, num_pages: int, limit: int
) -> None:
    """With grammars, aborts, and a pool so small that running requests come back into the queue.

    Catches: tokens that are counted twice or never taken back, of whatever way a request leaves by.
    """
    harness = Harness(
        rows=rows,
        num_pages=num_pages,
        page_size=2,
        max_seq_len=2 * num_pages + 1,
        max_queued_tokens=limit,
        compiler=InlineCompiler(),
    )
    leaves: dict[int, int] = {}
    for uid, (length, masked, steps) in enumerate(asked):
        grammar = GrammarSpec("grammar", f"{uid}:2") if masked else None
        harness.submit(
            uid, [place % 7 + 2 for place in range(length)], max_tokens=4, grammar=grammar
        )
        before = harness.scheduler.num_queued_tokens
        harness.scheduler.receive(0)
        after = harness.scheduler.num_queued_tokens
        assert after == before or after <= max(limit, length)
        leaves[uid] = uid + steps if steps else -1
        for leaver in [one for one, when in leaves.items() if when == uid]:
            harness.abort(leaver)
        if uid % 2:
            harness.step()
    harness.finish()  # which asserts that nothing is counted as waiting any more
    assert all(len(client.reasons) == 1 for client in harness.clients.values())
