"""Scheduling policies: how a step is shared, and how long anybody may be left out of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.scheduler.policy import MAX_PAUSE, DecodeFirst, PolicyName, PrefillFirst, make_policy
from support.examples import scaled
from support.fake_engine import generate
from support.scheduling import Harness

POLICIES: tuple[PolicyName, ...] = ("decode-first", "prefill-first")


@pytest.mark.parametrize("name", POLICIES)
@given(
    budget=st.integers(1, 64),
    page_size=st.integers(1, 32),
    steps=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 9), st.booleans()), max_size=80),
)
def test_invariant_15_no_policy_leaves_anybody_out_for_long(
    name: PolicyName, budget: int, page_size: int, steps: list[tuple[int, int, bool]]
) -> None:
    """Whatever the load, decode rows pause for a bounded number of steps, prompts get a page.

    Catches: a pause that is not counted, a budget that decode rows use up.
    """
    policy = make_policy(name, budget, page_size)
    longest = 0 if name == "decode-first" else MAX_PAUSE
    paused = 0
    for num_rows, num_prompts, fits in steps:
        allowed = policy.prefill_budget(num_rows, num_prompts)
        assert allowed >= page_size
        num_chunks = num_prompts if fits else 0
        runs = policy.runs_decode(num_rows, num_chunks)
        assert runs or num_chunks, "a step must not be empty while rows could decode"
        paused = 0 if runs else paused + 1
        assert paused <= longest
        if runs and num_rows and num_chunks:
            assert allowed + num_rows <= max(budget, num_rows + page_size), "over the budget"
        assert allowed <= max(budget, page_size)


def test_prefill_first_gives_steps_to_prompts_alone_and_then_shares_one() -> None:
    policy = PrefillFirst(100, 4, max_pause=2)
    shares = []
    for _ in range(6):
        budget = policy.prefill_budget(30, 5)
        shares.append((budget, policy.runs_decode(30, 5)))
    assert shares == [(100, False), (100, False), (70, True)] * 2
    assert policy.runs_decode(30, 0), "nothing fits: the rows go on"


def test_decode_first_always_shares() -> None:
    policy = DecodeFirst(100, 16)
    assert [policy.prefill_budget(rows, 5) for rows in (0, 30, 90, 300)] == [100, 70, 16, 16]
    assert policy.runs_decode(300, 5)


def batch_sizes(policy: PolicyName) -> tuple[list[int], Harness]:
    """Decode rows of each step of 12 prompts that arrive together."""
    harness = Harness(rows=12, num_pages=400, budget=8, policy=policy)
    for uid in range(12):
        harness.submit(uid, [uid % 8 + 2, *[3] * 7], max_tokens=6, min_tokens=6)
    harness.finish()
    return [plan.num_decode_rows for plan in harness.engine.plans], harness


def test_prefill_first_makes_larger_decode_batches_out_of_the_same_work() -> None:
    """Catches: a policy that is accepted and changes nothing."""
    rates = {}
    for policy in POLICIES:
        sizes, harness = batch_sizes(policy)
        decode = [size for size in sizes if size]
        rates[policy] = sum(decode) / len(decode)
        for uid in range(12):
            prompt = [uid % 8 + 2, *[3] * 7]
            assert harness.clients[uid].tokens == generate(prompt, 6, min_tokens=6)
    assert rates["prefill-first"] > 1.4 * rates["decode-first"]


@given(
    page_size=st.sampled_from([1, 4, 16]),
    rows=st.integers(2, 6),
    budget=st.integers(1, 30),
    policy=st.sampled_from(POLICIES),
    order=st.sampled_from(["fcfs", "longest-prefix"]),
    overlap=st.booleans(),
)
@settings(max_examples=scaled(50))  # an example is 120 steps
def test_invariant_15_both_sides_go_on_under_endless_arrivals(
    page_size: int, rows: int, budget: int, policy: PolicyName, order: str, overlap: bool
) -> None:
    """In a pool that holds all rows, a running request gets a token every few steps, and the
    prompt that is being computed gets a chunk in every step, for ever.

    Catches: prompts that always win, decode rows that always win, a pause that restarts.
    """
    harness = Harness(
        page_size=page_size,
        num_pages=rows * -(-40 // page_size),
        max_seq_len=40,
        rows=rows,
        budget=budget,
        policy=policy,
        order=order,  # type: ignore[arg-type]
        overlap=overlap,
    )
    pause = 0 if policy == "decode-first" else MAX_PAUSE
    newest: dict[int, tuple[int, int]] = {}  # uid: number of tokens, step of the last one
    for now in range(120):
        harness.submit(now, [now % 8 + 2, *[2, 3, 4, 5] * 3], max_tokens=6, min_tokens=6)
        harness.step()
        for uid, client in harness.clients.items():
            count, since = newest.get(uid, (0, now))
            if len(client.tokens) > count:
                newest[uid] = (len(client.tokens), now)
            elif client.tokens and not client.reasons:
                assert now - since <= pause + 2, f"request {uid} runs and gets no token"
    assert harness.scheduler.num_retractions == 0
    check_prompts_go_on(harness, page_size)


def check_prompts_go_on(harness: Harness, page_size: int) -> None:
    """The oldest prompt that is not complete gets at least a page, or its rest, in each step."""
    inner: dict[int, None] = {}  # rows with an unfinished prompt, oldest first
    for plan in harness.engine.plans:
        chunks = {row: (length, last) for row, _, length, last in plan.chunks.tolist()}
        if inner:
            length, last = chunks.get(next(iter(inner)), (0, 0))
            assert last or length >= page_size, "a prompt that has room got no page"
        for row, (_, last) in chunks.items():
            inner[row] = None
            if last:
                del inner[row]
