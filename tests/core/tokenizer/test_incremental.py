"""The pieces of a text stream concatenate to the decode of the whole, for any tokens."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minisgl.tokenizer.incremental import REPLACEMENT, TextDecoder
from support.text_tokenizers import byte_level, sentencepiece

TOKENIZERS = {"byte_level": byte_level(), "sentencepiece": sentencepiece()}
DECODERS = {name: TextDecoder(tokenizer) for name, tokenizer in TOKENIZERS.items()}
TEXTS = st.text(alphabet="abc helowrd.é日😀👩‍👩‍👧\n", max_size=30)

both = pytest.mark.parametrize("kind", TOKENIZERS)


def pieces(kind: str, token_ids: list[int], *, skip: bool) -> list[str]:
    stream = DECODERS[kind].stream(skip_special_tokens=skip)
    return [*(stream.push(token_id) for token_id in token_ids), stream.finish()]


def whole(kind: str, token_ids: list[int], *, skip: bool) -> str:
    text: str = TOKENIZERS[kind].decode(
        token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )
    return text


@both
@example(numbers=[129, 97], skip=False)  # a byte that begins no character, and a letter
@given(numbers=st.lists(st.integers(0, 10_000), max_size=40), skip=st.booleans())
def test_invariant_19_any_tokens_concatenate_to_the_one_shot_decode(kind, numbers, skip) -> None:
    """Catches: spaces lost between tokens, bytes of a character that are flushed too early."""
    size = len(TOKENIZERS[kind]) + 5  # ids past the vocabulary stand for padding of the model's
    token_ids = [number % size for number in numbers]
    assert "".join(pieces(kind, token_ids, skip=skip)) == whole(kind, token_ids, skip=skip)


@both
@given(text=TEXTS)
def test_real_text_concatenates_and_never_shows_half_a_character(kind, text) -> None:
    token_ids = TOKENIZERS[kind](text, add_special_tokens=False)["input_ids"]
    streamed = pieces(kind, token_ids, skip=True)
    assert "".join(streamed) == whole(kind, token_ids, skip=True)
    assert not any(REPLACEMENT in piece for piece in streamed)


@both
@given(text=TEXTS.filter(bool), data=st.data())
def test_text_cut_anywhere_has_replacements_only_at_its_very_end(kind, text, data) -> None:
    token_ids = TOKENIZERS[kind](text, add_special_tokens=False)["input_ids"]
    end = data.draw(st.integers(0, len(token_ids)))
    streamed = pieces(kind, token_ids[:end], skip=True)
    assert "".join(streamed) == whole(kind, token_ids[:end], skip=True)
    assert not any(REPLACEMENT in piece for piece in streamed[:-1])


def test_an_emoji_of_several_tokens_arrives_in_one_piece() -> None:
    token_ids = TOKENIZERS["byte_level"]("a😀b")["input_ids"]
    assert len(token_ids) > 3
    assert [piece for piece in pieces("byte_level", token_ids, skip=True) if piece] == [
        "a",
        "😀",
        "b",
    ]


def test_an_incomplete_character_is_flushed_at_the_end() -> None:
    token_ids = TOKENIZERS["byte_level"]("a😀")["input_ids"][:-1]
    assert pieces("byte_level", token_ids, skip=True)[-1] == REPLACEMENT


@both
def test_spaces_between_words_survive(kind) -> None:
    token_ids = TOKENIZERS[kind]("hello world the quick", add_special_tokens=False)["input_ids"]
    assert "".join(pieces(kind, token_ids, skip=True)) == "hello world the quick"


@both
def test_a_skipped_special_token_between_words_keeps_the_space(kind) -> None:
    tokenizer = TOKENIZERS[kind]
    first = tokenizer("hello", add_special_tokens=False)["input_ids"]
    second = tokenizer(" world", add_special_tokens=False)["input_ids"]
    token_ids = [*first, tokenizer.eos_token_id, *second]
    assert "".join(pieces(kind, token_ids, skip=True)) == whole(kind, token_ids, skip=True)
    assert tokenizer.eos_token in "".join(pieces(kind, token_ids, skip=False))


def test_added_tokens_that_are_not_special_are_text() -> None:
    token_ids = TOKENIZERS["byte_level"]("a<tool call>b")["input_ids"]
    assert "".join(pieces("byte_level", token_ids, skip=True)) == "a<tool call>b"


def test_text_that_waits_for_a_neighbour_can_be_looked_at() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    newline = tokenizer.convert_tokens_to_ids("<0x0A>")
    stream = DECODERS["sentencepiece"].stream(skip_special_tokens=True)
    stream.push(tokenizer.convert_tokens_to_ids("▁Hello"))
    assert stream.push(newline) == ""
    assert stream.peek() == "\n"
    assert stream.finish() == "\n"


def test_the_window_stays_small_over_a_long_text() -> None:
    decoder = DECODERS["sentencepiece"]
    lengths: list[int] = []
    decode = decoder.decode

    def counted(token_ids: list[int]) -> str:
        lengths.append(len(token_ids))
        return decode(token_ids)

    decoder.decode = counted  # type: ignore[method-assign]
    try:
        stream = decoder.stream(skip_special_tokens=True)
        for _ in range(500):
            stream.push(TOKENIZERS["sentencepiece"].convert_tokens_to_ids("▁world"))
    finally:
        del decoder.decode  # type: ignore[method-assign]
    assert max(lengths) <= 2
