"""Invariants 14 to 16 (DESIGN section 7): any request, any prompt, and when its turn comes."""

from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minisgl.engine.plan import BatchPlan
from minisgl.errors import RequestError
from minisgl.message import GenerateRequest
from minisgl.request import SamplingParams
from minisgl.scheduler.waiting import SKIP_LIMIT
from support.audit import Audit, Feed
from support.examples import scaled
from support.fake_engine import VOCAB, generate
from support.schedules import Ask, plain, run, schedules, set_ups
from support.scheduling import Client, Harness

FIELDS = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "min_tokens",
    "ignore_eos",
)  # fmt: skip
WHOLE = (-(2**31), -2, -1, 0, 1, 2, 9, 40, 2**31 - 1, 2**31, 2**40, 2**63)
OTHER = (0.5, 1e-9, 1e9, float("nan"), float("inf"), -0.1, True, None)
ANY_PROMPT = st.builds(
    lambda good, odd: [*good[:2], *odd, *good[2:]],
    st.lists(st.integers(0, VOCAB - 1), max_size=4),
    st.lists(st.sampled_from([VOCAB, -1, 2**31 - 1, -(2**31)]), max_size=1),
)


def check_answer(harness: Harness, prompt: list[int], params: SamplingParams, priority: int) -> str:
    """Send one request, then a harmless one; returns how the first ended."""
    harness.clients[0] = Client()
    token_ids = np.array(prompt, dtype="<i4").tobytes()
    harness.transport.inbox.append(GenerateRequest(0, token_ids, params, priority))
    harness.finish()
    [reason] = harness.clients[0].reasons
    assert bool(harness.clients[0].failures[0]) == (reason == "error")
    assert all(0 <= token < VOCAB for token in harness.clients[0].tokens)
    harness.submit(1, [2, 3, 4], max_tokens=3)
    harness.finish()
    assert harness.clients[1].tokens == generate([2, 3, 4], 3)
    return reason


@example(value=2**31, priority=0, set_up=plain())
@given(
    value=st.sampled_from(WHOLE + OTHER),
    priority=st.integers(-(2**40), 2**40),
    set_up=set_ups(),
)
@settings(max_examples=scaled(100))  # an example tries every parameter
def test_invariant_14_any_parameters_get_an_answer_and_the_next_request_is_served(
    value: Any, priority: int, set_up: dict[str, Any]
) -> None:
    """They are refused where they are made, or the scheduler answers; it never raises.

    Catches: a min_tokens that no context holds, a number that overflows the 32 bits of a plan,
    a stop token outside the vocabulary, silence.
    """
    for name in FIELDS:
        params, refusal = None, None
        try:
            fields: dict[str, Any] = {name: [value] if name == "stop_token_ids" else value}
            params = SamplingParams(**fields)
        except RequestError as error:
            refusal = error
        if params is not None:
            check_answer(Harness(**set_up), [2, 3], params, priority)
        else:
            assert refusal is not None
            assert refusal.param in FIELDS


@example(prompt=[VOCAB], set_up=plain())
@given(prompt=ANY_PROMPT, set_up=set_ups())
def test_invariant_14_any_token_ids_get_an_answer_and_the_next_request_is_served(
    prompt: list[int], set_up: dict[str, Any]
) -> None:
    """Catches: a token id outside the vocabulary that reaches the embedding, an empty prompt."""
    reason = check_answer(Harness(**set_up), prompt, SamplingParams(max_tokens=3), 0)
    is_prompt = len(prompt) > 0 and all(0 <= token < VOCAB for token in prompt)
    assert (reason == "error") == (not is_prompt)


class StepsWithoutToken(Audit):
    """Counts, for every running request, steps since its newest token; ``worst`` is the most."""

    worst = 0

    def attach(self, harness: Harness) -> None:
        super().attach(harness)
        self.clients = harness.clients
        self.seen: dict[int, tuple[int, int]] = {}
        self.now = 0

    def stepped(self) -> None:
        self.now += 1
        for uid, client in self.clients.items():
            count, since = self.seen.get(uid, (0, self.now))
            if len(client.tokens) > count:
                self.seen[uid] = (len(client.tokens), self.now)
            elif client.tokens and not client.reasons:
                self.worst = max(self.worst, self.now - since)


@example(page_size=1, rows=4, budget=1, overlap=False, mixed=False)
@given(
    page_size=st.integers(1, 16),
    rows=st.integers(2, 6),
    budget=st.integers(1, 30),
    overlap=st.booleans(),
    mixed=st.booleans(),
)
def test_invariant_15_nobody_starves_under_endless_arrivals(
    page_size: int, rows: int, budget: int, overlap: bool, mixed: bool
) -> None:
    """With a new request in every step, each running one gets a token in each step or two.

    The bound on the first two requests' ends is the steps that the prompts of one full table
    take, chunk by chunk, and as many steps as a request has tokens, twice.

    Catches: prefills that always win, an admission that always prefers the newcomer.
    """
    harness = Harness(
        page_size=page_size,
        num_pages=-(-200 // page_size),
        max_seq_len=40,
        rows=rows,
        budget=budget,
        overlap=overlap,
        mixed=mixed,
    )
    audit = StepsWithoutToken()
    audit.attach(harness)
    prompt_len, max_tokens = 13, 6
    chunks = -(-prompt_len // max(1, min(budget - rows, prompt_len)))
    for now in range(rows * chunks + 2 * max_tokens + 2):
        harness.submit(now, [2, 3, 4, 5] * 3 + [now % 8 + 2], max_tokens=6, min_tokens=6)
        harness.step()
    assert audit.worst <= 2, "a request runs and gets no token"
    assert harness.clients[0].reasons
    assert harness.clients[1].reasons
    ended = [stats.uid for stats in harness.recorder.requests]
    assert ended == sorted(ended), "equal requests end in the order of their arrival"


class Admissions(Audit):
    """Notes the uids that got a row, in order."""

    def attach(self, harness: Harness) -> None:
        super().attach(harness)
        self.uids: list[int] = []

    def launched(self, plan: BatchPlan, feeds: list[Feed]) -> None:
        rows = plan.added["row"].tolist()
        self.uids += [self.scheduler.table.owner(row).uid for row in rows]


@example(large=15, rows=5, page_size=4, before=7, arrivals=1, budget=8)
@given(
    large=st.integers(15, 24),
    rows=st.integers(2, 8),
    page_size=st.sampled_from([1, 2, 4]),
    before=st.integers(2, 12),
    arrivals=st.integers(1, 3),
    budget=st.integers(8, 40),
)
@settings(max_examples=scaled(80))  # an example is some hundred steps
def test_invariant_15_a_large_request_is_overtaken_only_so_often(
    large: int, rows: int, page_size: int, before: int, arrivals: int, budget: int
) -> None:
    """Small requests arrive for ever; not one more than ``SKIP_LIMIT`` of them passes a large one.

    Catches: skip-ahead without ageing, under which small requests pass a large one for ever; one
    that looks at the limit once a step, in which several requests may be admitted.
    """
    harness = Harness(
        page_size=page_size,
        num_pages=-(-30 // page_size),
        max_seq_len=30,
        rows=rows,
        budget=budget,
        cache="naive",
    )
    audit = Admissions()
    audit.attach(harness)
    for uid in range(before):  # one after the other, so that they never all end together
        harness.submit(uid, [uid % 8 + 2] * 3, max_tokens=6, min_tokens=6)
        harness.step()
    harness.submit(1000, [9] * large, max_tokens=4, min_tokens=4)
    for now in range(600):
        for place in range(arrivals):
            harness.submit(2000 + 3 * now + place, [now % 8 + 2] * 3, max_tokens=4, min_tokens=4)
        harness.step()
        if 1000 in audit.uids:
            break
    assert 1000 in audit.uids, "it is never admitted"
    first_ones = audit.uids[: audit.uids.index(1000)]
    assert len([uid for uid in first_ones if uid >= 2000]) <= SKIP_LIMIT


class Chunks(Audit):
    """Checks what every request computes, by uid."""

    def __init__(self, schedule: list[Ask]) -> None:
        self.sequences = [[*ask.prompt, *ask.tokens] for ask in schedule]

    def attach(self, harness: Harness) -> None:
        super().attach(harness)
        self.next_position: dict[int, int] = {}

    def launched(self, plan: BatchPlan, feeds: list[Feed]) -> None:
        table, page_size = self.scheduler.table, self.scheduler.cache.page_size
        for row in plan.added["row"].tolist():
            self.next_position.pop(table.owner(row).uid, None)
        for feed in feeds:
            request = table.owner(feed.row)
            expected = self.next_position.get(request.uid)
            if expected is None:
                assert feed.start % page_size == 0, "a cached prefix is whole pages"
            else:
                assert feed.start == expected, "a position is left out or computed twice"
            end = feed.start + feed.length
            self.next_position[request.uid] = end
            if feed.tokens is not None:
                assert feed.length > 0
                assert feed.tokens == self.sequences[request.uid][feed.start : end]
                is_last = end == int(table.num_tokens[feed.row])
                assert feed.sampled == is_last, "a token follows the last chunk and no other"


@example(plain(rows=2, budget=2), [Ask(0, (2,), 1), Ask(0, (2, 2), 1)])
@example(plain(), [Ask(0, (2, 2), 1)])
@example(plain(overlap=True), [Ask(0, (2, 2), 1)])
@example(
    plain(page_size=1, num_pages=36, max_seq_len=40, rows=3, budget=6, cache="radix"),
    [
        *[Ask(0, (2,), 1)] * 2,
        Ask(0, (*[7] * 15, 2, 3), 4),
        Ask(0, (3,), 5),
        Ask(0, (*(2, 3, 4, 5) * 2, 2, 3, 2), 2, min_tokens=2, stop_token_ids=(3,), grammar="2:4"),
    ],
)
@given(set_ups(), schedules(max_size=6))
def test_invariant_16_chunks_concatenate_to_the_prompt(
    set_up: dict[str, Any], schedule: list[Ask]
) -> None:
    """From the cached prefix to the last token every position is computed once, in order.

    Each step stays within its token budget: decode rows, and chunks in what they leave of it,
    of which a waiting prompt gets at least a page.

    Catches: a chunk computed twice or left out, output from an inner chunk, a budget overrun.
    """
    audit = Chunks(schedule)
    harness = run(set_up, schedule, audit)
    for plan in harness.engine.plans:
        allowed = max(set_up["budget"], plan.num_decode_rows + set_up["page_size"])
        assert plan.num_tokens <= allowed
    for uid, ask in enumerate(schedule):
        # The last token is never fed, but for a stop that the host sees one step later.
        num_fed = len(ask.prompt) + len(ask.tokens) - 1
        if ask.reason == "error":
            # Retracted before its dead end is seen, it ends while it is computed again, or before.
            assert audit.next_position.get(uid, 0) <= num_fed
            continue
        past_the_end = int(ask.reason == "stop" and set_up["overlap"])
        assert num_fed <= audit.next_position[uid] <= num_fed + past_the_end
