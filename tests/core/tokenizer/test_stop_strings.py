"""Stop strings are found whatever the cut of the text, and no part of one is sent early."""

from hypothesis import example, given
from hypothesis import strategies as st

from minisgl.tokenizer.stop_strings import StopFinder

STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Where the first stop string to end begins and ends, by brute force."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end - max(map(len, found)), end
    return None


def run(finder: StopFinder, pieces: list[str]) -> tuple[list[str], bool]:
    sent = []
    for piece in pieces:
        text, found = finder.feed(piece, may_stop=True)
        sent.append(text)
        if found:
            return sent, True
    return [*sent, finder.flush()], False


@example(pieces=["a", "a"], stops=["aa"], include=False)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=5), max_size=12),
    stops=STOPS,
    include=st.booleans(),
)
def test_invariant_19_any_cut_of_the_text_gives_the_same_answer(pieces, stops, include) -> None:
    """Catches: a stop string across a border that is missed, or whose beginning was sent."""
    text = "".join(pieces)
    sent, found = run(StopFinder(stops, include=include), pieces)
    where = first_stop(text, stops)
    assert found == (where is not None)
    expected = text if where is None else text[: where[1] if include else where[0]]
    assert "".join(sent) == expected


@given(pieces=st.lists(st.text(alphabet="abc", max_size=5), max_size=12), stops=STOPS)
def test_only_text_that_may_begin_a_stop_string_is_held(pieces, stops) -> None:
    finder = StopFinder(stops, include=False)
    for piece in pieces:
        _, found = finder.feed(piece, may_stop=True)
        if found:
            return
        assert not finder.held or any(
            stop.startswith(finder.held) and stop != finder.held for stop in stops
        )


@given(
    early=st.text(alphabet="ab", max_size=8),
    late=st.text(alphabet="ab", max_size=8),
    stops=STOPS,
)
def test_stop_strings_that_end_too_early_do_not_count(early, late, stops) -> None:
    finder = StopFinder(stops, include=False)
    sent, found = finder.feed(early, may_stop=False)
    assert not found
    rest, found = finder.feed(late, may_stop=True)
    text = early + late
    where = next(
        (
            (end - max(len(s) for s in stops if text[:end].endswith(s)), end)
            for end in range(len(early) + 1, len(text) + 1)
            if any(text[:end].endswith(stop) for stop in stops)
        ),
        None,
    )
    assert found == (where is not None)
    assert sent + rest + finder.held == (text if where is None else text[: where[0]])


@given(
    seen=st.text(alphabet="ab", max_size=6), ahead=st.text(alphabet="ab", max_size=5), stops=STOPS
)
def test_looking_ahead_agrees_with_reading_on(seen, ahead, stops) -> None:
    finder = StopFinder(stops, include=False)
    _, found = finder.feed(seen, may_stop=True)
    if found:
        return
    expected = finder.ends_within(ahead)
    assert finder.feed(ahead, may_stop=True)[1] == expected


def test_a_very_long_stop_string_costs_nothing_until_it_matches() -> None:
    finder = StopFinder(["x" * 1_000_000], include=False)
    assert finder.feed("hello", may_stop=True) == ("hello", False)
    assert finder.feed("xx", may_stop=True) == ("", False)
    assert finder.feed("y", may_stop=True) == ("xxy", False)
