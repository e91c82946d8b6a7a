"""Log-probabilities with texts: one a token, and bytes that concatenate to the text."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.message import (
    LogprobBatch,
    PromptLogprobs,
    StreamStart,
    TextReply,
    TokenBatch,
    TokenLogprob,
)
from minisgl.request import SamplingParams
from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.incremental import REPLACEMENT
from minisgl.tokenizer.token_ids import TokenIdStreams
from support.text_tokenizers import IM_END_ID, byte_level, sentencepiece

TOKENIZERS = {"byte_level": byte_level(), "sentencepiece": sentencepiece()}
TEXTS = st.text(alphabet="abc helowrd.é日😀👩‍👩‍👧\n", max_size=20)

both = pytest.mark.parametrize("kind", TOKENIZERS)


def logprobs_of(places: Sequence[int], tops: Sequence[Sequence[int]]) -> LogprobBatch:
    """Numbers that tell what they belong to: place ``p`` has ``-p``, its alternatives -i/8."""

    def i4(values: Sequence[int]) -> bytes:
        return np.array(values, dtype="<i4").tobytes()

    values = [-place / 8 for top in tops for place in range(len(top))]
    return LogprobBatch(
        places=i4(places),
        num_top=i4([len(top) for top in tops]),
        chosen=np.array([-float(place) for place in places], dtype="<f4").tobytes(),
        ranks=i4([place + 1 for place in places]),
        top_ids=i4([token for top in tops for token in top]),
        top_values=np.array(values, dtype="<f4").tobytes(),
    )


def step(
    tokens: Sequence[tuple[int, int]],
    logprobs: LogprobBatch | None = None,
    *,
    started: Sequence[StreamStart] = (),
    ends: Sequence[tuple[int, str]] = (),
    prompts: Sequence[PromptLogprobs] = (),
) -> TokenBatch:
    return TokenBatch(
        list(started),
        np.asarray([uid for uid, _ in tokens], dtype="<i8").tobytes(),
        np.asarray([token for _, token in tokens], dtype="<i4").tobytes(),
        [uid for uid, _ in ends],
        [reason for _, reason in ends],
        [0 for _ in ends],
        [None for _ in ends],
        logprobs=logprobs,
        prompt_logprobs=list(prompts),
    )


def replies_of(kind: str, token_ids: list[int], reason: str, **params) -> list[TextReply]:
    """Feed one token a step, each with itself and three others as alternatives."""
    detokenizer = Detokenizer(TOKENIZERS[kind])
    replies = []
    start = StreamStart(1, 5, SamplingParams(logprobs=4, **params))
    for place, token in enumerate(token_ids):
        is_last = place == len(token_ids) - 1
        replies += detokenizer.process(
            step(
                [(1, token)],
                logprobs_of([0], [[token, 5, 9, 0]]),
                started=[] if place else [start],
                ends=[(1, reason)] if is_last else [],
            )
        )[0]
    texts = [reply for reply in replies if isinstance(reply, TextReply)]
    assert len(texts) == len(replies)
    return texts


def flat(replies: list[TextReply]) -> list[TokenLogprob]:
    return [one for reply in replies for one in reply.logprobs]


@both
@given(text=TEXTS.filter(bool), data=st.data(), skip=st.booleans())
def test_bytes_concatenate_to_the_text_with_each_reply_its_tokens(kind, text, data, skip) -> None:
    """Catches: half a character as U+FFFD, a lost space, bytes of tokens that nobody can see."""
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    place = data.draw(st.integers(0, len(token_ids)))
    token_ids[place:place] = data.draw(st.lists(st.sampled_from([0, 1, 2]), max_size=2))
    replies = replies_of(kind, token_ids, "length", skip_special_tokens=skip)
    for reply in replies:
        assert [one.chosen.token_id for one in reply.logprobs] == list(reply.token_ids)
    joined = "".join(reply.text for reply in replies)
    if REPLACEMENT not in joined:
        assert b"".join(one.chosen.data for one in flat(replies)).decode() == joined


@given(st.lists(st.integers(0, len(TOKENIZERS["byte_level"]) + 5), min_size=1, max_size=30))
def test_bytes_of_any_byte_level_tokens_decode_to_the_text(token_ids) -> None:
    replies = replies_of("byte_level", token_ids, "length")
    joined = b"".join(one.chosen.data for one in flat(replies))
    assert joined.decode(errors="replace") == "".join(reply.text for reply in replies)


@both
def test_a_token_alone_shows_the_part_of_a_character_that_it_is(kind) -> None:
    token_ids = TOKENIZERS[kind]("a😀", add_special_tokens=False)["input_ids"]
    found = flat(replies_of(kind, token_ids, "length"))
    parts = found[-3 if kind == "byte_level" else -4 :]
    assert b"".join(one.chosen.data for one in parts) == "😀".encode()
    assert all(one.chosen.text == one.chosen.data.decode(errors="replace") for one in parts)
    assert all(REPLACEMENT in one.chosen.text for one in parts)


def test_numbers_reach_the_tokens_that_they_belong_to() -> None:
    """Two requests in a batch, of which only the second wants any, and fewer than it gets."""
    detokenizer = Detokenizer(TOKENIZERS["byte_level"])
    starts = [
        StreamStart(1, 5, SamplingParams()),
        StreamStart(2, 5, SamplingParams(logprobs=2)),
    ]
    ids = TOKENIZERS["byte_level"]("ab", add_special_tokens=False)["input_ids"]
    tokens = [(1, ids[0]), (2, ids[1]), (2, ids[0])]
    batch = step(tokens, logprobs_of([1, 2], [[ids[1], ids[0]], []]), started=starts)
    first, second = detokenizer.process(batch)[0]
    assert isinstance(first, TextReply)
    assert isinstance(second, TextReply)
    assert not first.logprobs
    assert [(one.chosen.logprob, one.chosen.rank) for one in second.logprobs] == [(-1, 2), (-2, 3)]
    assert [(t.text, t.data, t.logprob, t.rank) for t in second.logprobs[0].top] == [
        ("b", b"b", 0.0, 1),
        ("a", b"a", -0.125, 2),
    ]
    assert second.logprobs[1].top == []


def test_a_stop_string_ends_logprobs_where_it_ends_the_tokens() -> None:
    token_ids = TOKENIZERS["byte_level"]("abcde", add_special_tokens=False)["input_ids"]
    replies = replies_of("byte_level", token_ids, "length", stop=("cd",))
    assert "".join(reply.text for reply in replies) == "ab"
    assert [one.chosen.text for one in flat(replies)] == ["a", "b", "c", "d"]
    assert replies[-1].finish_reason == "stop"


def test_text_that_is_held_back_keeps_its_logprobs() -> None:
    token_ids = TOKENIZERS["byte_level"]("abc", add_special_tokens=False)["input_ids"]
    replies = replies_of("byte_level", token_ids, "length", stop=("bx",))
    sent = [(reply.text, [one.chosen.text for one in reply.logprobs]) for reply in replies]
    assert sent == [("a", ["a"]), ("bc", ["b", "c"]), ("", [])]


def test_the_token_that_stops_has_a_text_and_no_bytes() -> None:
    ids = TOKENIZERS["byte_level"]("ab", add_special_tokens=False)["input_ids"]
    for last, shown in ((IM_END_ID, "<|im_end|>"), (ids[1], "b")):
        found = flat(replies_of("byte_level", [ids[0], last], "stop"))
        assert (found[-1].chosen.text, found[-1].chosen.data) == (shown, b"")


@both
@pytest.mark.parametrize("wants_logprobs", [True, False])
def test_the_prompt_comes_back_once_with_the_first_reply(kind, wants_logprobs) -> None:
    tokenizer = TOKENIZERS[kind]
    prompt = [1, *tokenizer("hello wor日😀", add_special_tokens=False)["input_ids"]]
    params = SamplingParams(return_prompt=True, prompt_logprobs=1 if wants_logprobs else None)
    data = np.array(prompt, dtype="<i4").tobytes()
    start = StreamStart(1, len(prompt), params, prompt_token_ids=data)
    numbers = logprobs_of(range(len(prompt) - 1), [[7]] * (len(prompt) - 1))
    detokenizer, token = Detokenizer(tokenizer), tokenizer("a")["input_ids"][-1]
    prompts = [PromptLogprobs(1, numbers)] if wants_logprobs else []
    replies = detokenizer.process(step([(1, token)], started=[start], prompts=prompts))[0]
    replies += detokenizer.process(step([(1, token)], ends=[(1, "length")]))[0]
    echoes = [reply.prompt for reply in replies if isinstance(reply, TextReply)]
    assert echoes[0] is not None
    assert echoes[1:] == [None] * (len(echoes) - 1)
    assert echoes[0].token_ids == prompt
    assert echoes[0].text == tokenizer.decode(prompt)
    if not wants_logprobs:
        assert echoes[0].logprobs == []
        return
    first, *others = echoes[0].logprobs
    assert first is None
    assert [one.chosen.logprob for one in others if one] == [-float(n) for n in range(len(others))]
    assert [one.chosen.token_id for one in others if one] == prompt[1:]
    data = tokenizer.decode(prompt[:1]).encode() + b"".join(x.chosen.data for x in others if x)
    assert data.decode() == echoes[0].text


def test_without_a_tokenizer_there_are_numbers_and_ids() -> None:
    streams = TokenIdStreams()
    data = np.array([3, 4], dtype="<i4").tobytes()
    start = StreamStart(1, 2, SamplingParams(logprobs=1), prompt_token_ids=data)
    prompts = [PromptLogprobs(1, logprobs_of([0], [[6]]))]
    batch = step([(1, 8)], logprobs_of([0], [[9]]), started=[start], prompts=prompts)
    (reply,) = streams.process(batch)[0]
    assert isinstance(reply, TextReply)
    assert [(one.chosen.token_id, one.top[0].token_id) for one in reply.logprobs] == [(8, 9)]
    assert reply.prompt is not None
    assert reply.prompt.token_ids == [3, 4]
    assert [one.chosen.token_id if one else None for one in reply.prompt.logprobs] == [None, 4]
    last = streams.process(step([], ends=[(1, "abort")]))[0][0]
    assert isinstance(last, TextReply)
    assert last.prompt is None
    assert streams.num_open == 0
