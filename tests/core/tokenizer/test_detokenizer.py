"""The detokenizer: exact text, exact counts, one terminal event a request, no state left over."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minisgl.message import ErrorReply, Failure, StopFound, StreamStart, TextReply, TokenBatch
from minisgl.request import SamplingParams
from minisgl.tokenizer.detokenizer import Detokenizer
from support.text_tokenizers import IM_END_ID, byte_level, sentencepiece

TOKENIZER = byte_level()
PIECES = sentencepiece()

End = tuple[int, str] | tuple[int, str, Failure]


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def batch(
    tokens: Sequence[tuple[int, int]] = (),
    *,
    started: Sequence[StreamStart] = (),
    ends: Sequence[End] = (),
    num_cached: int = 0,
) -> TokenBatch:
    return TokenBatch(
        list(started),
        np.asarray([uid for uid, _ in tokens], dtype="<i8").tobytes(),
        np.asarray([token for _, token in tokens], dtype="<i4").tobytes(),
        [end[0] for end in ends],
        [end[1] for end in ends],
        [num_cached for _ in ends],
        [end[2] if len(end) == 3 else None for end in ends],
    )


class Driver:
    """Feeds one request's tokens, split as told, and collects what comes out."""

    def __init__(self, tokenizer=TOKENIZER, **params) -> None:
        self.detokenizer = Detokenizer(tokenizer)
        self.replies: list[TextReply | ErrorReply] = []
        self.stops: list[StopFound] = []
        self.start = StreamStart(1, 5, SamplingParams(**params), 3)

    def feed(self, *groups: Sequence[int], reason: str | None = "length") -> "Driver":
        for number, group in enumerate(groups):
            last = number == len(groups) - 1 and reason is not None
            self.step(
                batch(
                    [(1, token) for token in group],
                    started=[self.start] if number == 0 else [],
                    ends=[(1, str(reason))] if last else [],
                    num_cached=4,
                )
            )
        return self

    def step(self, step: TokenBatch) -> None:
        replies, stops = self.detokenizer.process(step)
        self.replies += replies
        self.stops += stops

    @property
    def text(self) -> str:
        return "".join(reply.text for reply in self.replies)

    @property
    def token_ids(self) -> list[int]:
        return [token for reply in self.replies for token in reply.token_ids]

    @property
    def last(self) -> TextReply:
        texts = [reply for reply in self.replies if isinstance(reply, TextReply)]
        terminal = [reply for reply in texts if reply.finish_reason is not None]
        assert len(terminal) == 1
        assert self.replies[-1] is terminal[0]
        return terminal[0]


@given(text=st.text(alphabet="abc helo😀é", min_size=1, max_size=20), data=st.data())
def test_text_and_tokens_are_whole_for_any_grouping_into_steps(text, data) -> None:
    token_ids = ids(text)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(token_ids)), max_size=6)))
    bounds = [0, *cuts, len(token_ids)]
    groups = [token_ids[a:b] for a, b in pairwise(bounds)]
    driver = Driver().feed(*groups)
    assert driver.text == text
    assert driver.token_ids == token_ids
    assert driver.last.num_completion_tokens == len(token_ids)
    assert driver.detokenizer.num_open == 0


def test_the_last_reply_has_the_totals() -> None:
    last = Driver().feed(ids("abc")).last
    assert (last.num_prompt_tokens, last.num_completion_tokens, last.num_cached_tokens) == (5, 3, 4)
    assert last.finish_reason == "length"


def test_each_token_of_plain_text_is_sent_at_once() -> None:
    driver = Driver().feed(*[[token] for token in ids("abc")], reason=None)
    assert [reply.text for reply in driver.replies] == ["a", "b", "c"]


@example(text="a", stops=["a"], include=False)
@given(
    text=st.text(alphabet="ab", min_size=1, max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=3), min_size=1, max_size=2),
    include=st.booleans(),
)
def test_invariant_19_stop_strings_cut_text_and_token_counts_exactly(text, stops, include) -> None:
    """Catches: usage that counts tokens past the cut, ``length`` where a stop string came first."""
    driver = Driver(stop=tuple(stops), include_stop_str_in_output=include)
    driver.feed(*[[token] for token in ids(text)], reason="length")
    ends = [end for end in range(1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    if not ends:
        assert driver.text == text
        assert driver.last.finish_reason == "length"
        return
    longest = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
    assert driver.text == text[: ends[0] if include else ends[0] - longest]
    assert driver.last.finish_reason == "stop"
    assert driver.last.num_completion_tokens == ends[0]
    assert driver.token_ids == ids(text)[: ends[0]]
    assert driver.detokenizer.num_open == 0


def test_a_stop_string_over_token_borders_is_never_partly_sent() -> None:
    tokens = ids("hello world")
    driver = Driver(stop="lo wo").feed(*[[token] for token in tokens], reason=None)
    assert driver.text == "hel"
    assert driver.last.finish_reason == "stop"


def test_text_held_for_a_stop_string_that_does_not_come_is_sent() -> None:
    driver = Driver(stop="abcX").feed(*[[token] for token in ids("zabcz")])
    assert driver.text == "zabcz"
    driver = Driver(stop="abcX").feed(*[[token] for token in ids("zabc")])
    assert driver.text == "zabc"


def test_the_scheduler_is_told_once_and_later_tokens_are_dropped() -> None:
    driver = Driver(stop="b").feed([ids("a")[0]], [ids("b")[0]], reason=None)
    assert driver.stops == [StopFound(1, 2)]
    driver.step(batch([(1, ids("c")[0])]))
    driver.step(batch([(1, ids("c")[0])], ends=[(1, "length")]))
    assert driver.text == "a"
    assert driver.last.num_completion_tokens == 2
    assert driver.last.num_cached_tokens == 3  # known from the start, the end has not come yet
    assert driver.stops == [StopFound(1, 2)]
    assert driver.detokenizer.num_open == 0


def test_a_stop_string_wins_over_the_length_limit_of_the_same_step() -> None:
    driver = Driver(stop="b").feed(ids("ab"), reason="length")
    assert driver.last.finish_reason == "stop"
    assert driver.stops == []


def test_a_stop_string_inside_one_step_of_many_tokens_drops_the_rest() -> None:
    driver = Driver(stop="c").feed(ids("abcab"), reason=None)
    assert driver.text == "ab"
    assert driver.token_ids == ids("abc")
    assert driver.stops == [StopFound(1, 3)]


def test_stop_strings_wait_for_min_tokens() -> None:
    driver = Driver(stop="a", min_tokens=3).feed(*[[token] for token in ids("abab")])
    assert driver.text == "ab"
    assert driver.last.num_completion_tokens == 3


def test_a_newline_of_a_byte_fallback_token_stops_at_once() -> None:
    tokens = PIECES.convert_tokens_to_ids(["▁Hello", "<0x0A>", "▁world"])
    driver = Driver(PIECES, stop="\n").feed(*[[token] for token in tokens], reason=None)
    assert driver.text == "Hello"
    assert driver.stops == [StopFound(1, 2)]


@pytest.mark.parametrize("include", [False, True])
def test_the_stop_token_counts_and_its_text_appears_only_if_asked_for(include) -> None:
    driver = Driver(stop_token_ids=[ids("c")[0]], include_stop_str_in_output=include)
    driver.feed(ids("ab"), ids("c"), reason="stop")
    assert driver.text == ("abc" if include else "ab")
    assert driver.last.num_completion_tokens == 3
    assert driver.token_ids == ids("abc")


@pytest.mark.parametrize("skip", [False, True])
def test_the_end_of_sequence_token_leaves_no_text(skip) -> None:
    driver = Driver(skip_special_tokens=skip).feed([*ids("a"), IM_END_ID], reason="stop")
    assert driver.text == "a"


def test_special_tokens_in_the_middle_are_skipped_unless_asked_for() -> None:
    tokens = [*ids("a"), IM_END_ID, *ids("b")]
    assert Driver(skip_special_tokens=True).feed(tokens).text == "ab"
    assert Driver(skip_special_tokens=False).feed(tokens).text == "a<|im_end|>b"


def test_an_incomplete_character_is_flushed_with_the_last_reply() -> None:
    driver = Driver().feed(*[[token] for token in ids("a😀")[:-1]])
    assert driver.text == "a\ufffd"
    assert driver.last.text.endswith("\ufffd")


def test_a_refused_request_gets_one_error_with_its_details() -> None:
    driver = Driver()
    driver.step(batch(ends=[(1, "error", Failure("too long", 400, "prompt", "too_long"))]))
    assert driver.replies == [ErrorReply(1, "too long", 400, "prompt", "too_long")]


def test_a_request_aborted_before_its_first_token_still_ends() -> None:
    driver = Driver()
    driver.step(batch(ends=[(1, "abort")]))
    assert driver.last.finish_reason == "abort"


def test_an_error_in_the_middle_ends_the_request_and_leaves_nothing() -> None:
    driver = Driver().feed(ids("ab"), reason=None)
    driver.step(batch(ends=[(1, "error", Failure("out of luck"))]))
    assert driver.replies[-1] == ErrorReply(1, "out of luck", 500)
    assert driver.detokenizer.num_open == 0


def test_one_request_that_cannot_be_decoded_does_not_hurt_the_others(monkeypatch, caplog) -> None:
    driver = Driver()
    other = StreamStart(2, 1, SamplingParams())
    driver.step(batch(started=[driver.start, other]))
    stream = driver.detokenizer._streams[1]
    monkeypatch.setattr(stream, "text", None)
    driver.step(batch([(1, 5), (2, ids("b")[0])]))
    assert [type(reply) for reply in driver.replies] == [ErrorReply, TextReply]
    assert driver.replies[0].status == 500
    assert driver.stops == [StopFound(1, 1)]
    driver.step(batch(ends=[(1, "stop"), (2, "length")]))
    assert driver.detokenizer.num_open == 0
    assert "cannot decode" in caplog.text


def test_many_requests_in_one_step_keep_their_texts_apart() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    starts = [StreamStart(uid, 1, SamplingParams()) for uid in range(256)]
    texts = {uid: f"{uid} a" for uid in range(256)}
    width = max(len(ids(text)) for text in texts.values())
    got = dict.fromkeys(texts, "")
    for position in range(width):
        tokens = [
            (uid, ids(text)[position]) for uid, text in texts.items() if position < len(ids(text))
        ]
        ends = [(uid, "length") for uid, t in texts.items() if position == len(ids(t)) - 1]
        step = batch(tokens, started=starts if position == 0 else [], ends=ends)
        for reply in detokenizer.process(step)[0]:
            got[reply.uid] += reply.text
    assert got == texts
    assert detokenizer.num_open == 0


@pytest.mark.parametrize("stop", [(), ("b",)])
def test_the_prompts_end_comes_with_the_first_reply_only(stop) -> None:
    driver = Driver(stop=stop)
    driver.start = StreamStart(1, 5, SamplingParams(stop=stop), prompt_tail="<think>\n")
    driver.feed(ids("a"), ids("a"), ids("b"))
    tails = [reply.prompt_tail for reply in driver.replies if isinstance(reply, TextReply)]
    assert tails[0] == "<think>\n"
    assert len(tails) > 2
    assert not any(tails[1:])
