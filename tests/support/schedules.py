"""Schedules for property tests: who asks for what and when, and everything that must not matter."""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from minisgl.request import GrammarSpec
from support.audit import Audit
from support.fake_engine import EOS, generate
from support.scheduling import Harness
from support.toy_grammar import allowed

MAX_PROMPT, MAX_TOKENS = 24, 12
GRAMMARS = ("1:2", "2:4", "3:9")


@dataclass(frozen=True)
class Ask:
    """One request of a schedule."""

    arrival: int
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    min_tokens: int = 0
    abort_after: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    grammar: str = ""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end it, once it has ``min_tokens``."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else {EOS})

    @property
    def tokens(self) -> list[int]:
        """What its client must get if nobody aborts it."""
        return generate(
            list(self.prompt),
            self.max_tokens,
            stop_ids=self.stop_ids,
            min_tokens=self.min_tokens,
            grammar=self.grammar,
        )

    @property
    def ends_with_a_token(self) -> bool:
        """Whether its last token ends it, and not that none may follow."""
        return self.tokens[-1:] == [EOS] or len(self.tokens) == self.max_tokens or not self.grammar

    @property
    def reason(self) -> str:
        """How it ends then."""
        tokens = self.tokens
        if tokens and tokens[-1] in self.stop_ids:
            return "stop"
        if len(tokens) == self.max_tokens:
            return "length"
        seed, length = map(int, self.grammar.split(":"))
        return "stop" if EOS in allowed(seed, length, tokens) else "error"


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """Prompts that often share prefixes, of a tiny alphabet; at most ``MAX_PROMPT`` tokens."""
    base = draw(st.sampled_from([(2, 3, 4, 5) * 6, (2, 3, 9, 9) * 6, (7,) * 24, (5, 6) * 12]))
    tail = draw(st.lists(st.integers(2, 9), max_size=3))
    return (*base[: draw(st.integers(0, 20))], *tail, draw(st.integers(2, 9)))


@st.composite
def asks(draw: st.DrawFn, *, with_aborts: bool = False, last_arrival: int = 12) -> Ask:
    """One request of at most ``MAX_PROMPT + MAX_TOKENS`` tokens."""
    max_tokens = draw(st.integers(1, MAX_TOKENS))
    return Ask(
        arrival=draw(st.integers(0, last_arrival)),
        prompt=draw(prompts()),
        max_tokens=max_tokens,
        priority=draw(st.integers(0, 2)),
        min_tokens=draw(st.integers(0, max_tokens)),
        abort_after=draw(st.one_of(st.none(), st.integers(0, 12))) if with_aborts else None,
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (), (3,), (9, 4)])),
        grammar=draw(st.sampled_from(["", "", *GRAMMARS])),
    )


def schedules(
    *, with_aborts: bool = False, min_size: int = 1, max_size: int = 7, last_arrival: int = 12
) -> st.SearchStrategy[list[Ask]]:
    """Some requests; their uids are their places."""
    one = asks(with_aborts=with_aborts, last_arrival=last_arrival)
    return st.lists(one, min_size=min_size, max_size=max_size)


@st.composite
def set_ups(
    draw: st.DrawFn, *, max_spare: int = 2, max_budget: int = 40, lazy: bool | None = None
) -> dict[str, Any]:
    """Everything that must not change a token: arguments of ``Harness``.

    Args:
        draw: hypothesis' own.
        max_spare: the pool holds one request, and at most so many more.
        max_budget: most tokens of a step; a small one makes many chunks.
        lazy: whether the engine works as late as it may; ``None`` draws it.
    """
    page_size = draw(st.sampled_from([1, 2, 3, 4, 16, 64, 256]))
    least = -(-(MAX_PROMPT + MAX_TOKENS) // page_size)
    return {
        "page_size": page_size,
        "num_pages": least + draw(st.integers(0, max_spare * least)),
        "max_seq_len": MAX_PROMPT + MAX_TOKENS + 4,
        "rows": draw(st.integers(1, 5)),
        "budget": draw(st.integers(1, max_budget)),
        "overlap": draw(st.booleans()),
        "mixed": draw(st.booleans()),
        "cache": draw(st.sampled_from(["radix", "naive"])),
        "lazy": draw(st.booleans()) if lazy is None else lazy,
        "policy": draw(st.sampled_from(["decode-first", "prefill-first"])),
        "order": draw(st.sampled_from(["fcfs", "longest-prefix"])),
        "shares": draw(st.booleans()),
    }


def plain(**changes: Any) -> dict[str, Any]:
    """Return the plainest of the set-ups, but for ``changes``."""
    return {
        "page_size": 1,
        "num_pages": MAX_PROMPT + MAX_TOKENS,
        "max_seq_len": MAX_PROMPT + MAX_TOKENS + 4,
        "rows": 1,
        "budget": 1,
        "overlap": False,
        "mixed": False,
        "cache": "radix",
        "lazy": False,
        "policy": "decode-first",
        "order": "fcfs",
        "shares": False,
        **changes,
    }


def run(set_up: dict[str, Any], schedule: list[Ask], audit: Audit | None = None) -> Harness:
    """Play a schedule to its end; ``audit`` looks on."""
    harness = Harness(**set_up)
    if audit is not None:
        audit.attach(harness)
    play(harness, schedule)
    return harness


def play(harness: Harness, schedule: list[Ask]) -> None:
    """Send the requests and aborts of a schedule when their time comes, and finish."""
    last = max((ask.arrival + (ask.abort_after or 0) for ask in schedule), default=0)
    for now in range(last + 1):
        for uid, ask in enumerate(schedule):
            if ask.arrival == now:
                submit(harness, uid, ask)
            if ask.abort_after is not None and ask.arrival + ask.abort_after == now:
                harness.abort(uid)
        harness.step()
    harness.finish()


def submit(harness: Harness, uid: int, ask: Ask) -> None:
    """Send one request now."""
    harness.submit(
        uid,
        list(ask.prompt),
        ask.priority,
        max_tokens=ask.max_tokens,
        min_tokens=ask.min_tokens,
        ignore_eos=ask.ignore_eos,
        stop_token_ids=ask.stop_token_ids,
        grammar=GrammarSpec("grammar", ask.grammar) if ask.grammar else None,
    )


def answers(harness: Harness, schedule: list[Ask]) -> list[tuple[list[int], list[str]]]:
    """Tokens and terminal events of every client."""
    clients = [harness.clients[uid] for uid in range(len(schedule))]
    return [(client.tokens, client.reasons) for client in clients]
