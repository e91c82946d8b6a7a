"""What is sent: random prompts, prompts with common prefixes, or a recorded trace. No torch.

Lengths, tokens and order come from the seed alone, so that two servers get the same requests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from minisgl.errors import SettingsError

Range = tuple[int, int]
"""Smallest and largest value, both included."""

TRACE_BLOCK: Final = 512
"""Tokens that one entry of a trace's ``hash_ids`` stands for, as Mooncake's traces have it."""

_WORDS: Final = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work number night
point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law
"""


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request.

    Attributes:
        prompt: text or token ids.
        output_len: most tokens to generate.
        at: seconds after the start, where a trace says so.
    """

    prompt: str | list[int]
    output_len: int
    at: float | None = None


class PromptMaker(Protocol):
    """Makes prompts out of draws; a prompt is whatever ``join`` returns."""

    def draw(self, rng: np.random.Generator, length: int) -> list[int]:
        """Return ``length`` random pieces."""

    def join(self, pieces: Sequence[int]) -> str | list[int]:
        """Return the prompt that consists of these pieces."""


class TokenIds:
    """Prompts of random token ids, from 0 to ``max_token_id``."""

    def __init__(self, max_token_id: int) -> None:
        self._max = max_token_id

    def draw(self, rng: np.random.Generator, length: int) -> list[int]:
        """Return random ids."""
        ids: list[int] = rng.integers(0, self._max + 1, length).tolist()
        return ids

    def join(self, pieces: Sequence[int]) -> list[int]:
        """Return them as they are."""
        return list(pieces)


class Words:
    """Prompts of common words, each of which is one token to most tokenizers.

    Args:
        vocabulary: the words, each with the space in front of it; a list that was made from a
            tokenizer makes lengths exact (``single_token_words``).
    """

    def __init__(self, vocabulary: Sequence[str] | None = None) -> None:
        self._words = list(vocabulary or [f" {word}" for word in _WORDS.split()])

    def draw(self, rng: np.random.Generator, length: int) -> list[int]:
        """Return random places in the list of words."""
        places: list[int] = rng.integers(0, len(self._words), length).tolist()
        return places

    def join(self, pieces: Sequence[int]) -> str:
        """Return the words as text."""
        return "".join(self._words[piece] for piece in pieces)


def single_token_words(reference: str) -> list[str]:
    """Return the words that are one token each, with the space in front, to a tokenizer.

    Args:
        reference: of a model, as ``minisgl serve --model`` takes it.

    Raises:
        ModelLoadError: there is no tokenizer.
        SettingsError: it has too few such words.
    """
    from minisgl.plugins.host import load_plugins
    from minisgl.tokenizer.loading import load_tokenizer

    tokenizer = load_tokenizer(load_plugins().resolve_checkpoint(reference, None))
    backend = tokenizer.backend_tokenizer
    found = sorted(
        {
            text
            for token_id in backend.get_vocab().values()
            if _is_word(text := backend.decode([token_id]))
        }
    )
    words = [w for w in found if len(backend.encode(w, add_special_tokens=False).ids) == 1]
    if len(words) < 100:
        raise SettingsError(
            f"--tokenizer {reference!r} has {len(words)} words that are one token each, too few "
            "for prompts of exact length; leave --tokenizer out"
        )
    return words


def _is_word(text: str) -> bool:
    return text[:1] == " " and len(text) > 2 and text[1:].isascii() and text[1:].isalpha()


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPrompts:
    """Prompts that share nothing.

    Attributes:
        input_len, output_len: tokens (or words) of a prompt, and of its answer.
    """

    input_len: Range
    output_len: Range

    def items(self, num: int, maker: PromptMaker, seed: int) -> list[WorkItem]:
        """Return ``num`` requests."""
        rng = np.random.default_rng((seed, 0))
        lengths = _lengths(rng, self.input_len, num), _lengths(rng, self.output_len, num)
        return [
            WorkItem(maker.join(maker.draw(rng, inputs)), outputs)
            for inputs, outputs in zip(*lengths, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Prompts in groups; those of one group begin alike, as with one system prompt.

    Attributes:
        num_groups: of different prefixes; requests take turns, in random order.
        prefix_len: tokens (or words) of each prefix.
        input_len: what follows the prefix.
        output_len: tokens of an answer.
    """

    num_groups: int
    prefix_len: int
    input_len: Range
    output_len: Range

    def items(self, num: int, maker: PromptMaker, seed: int) -> list[WorkItem]:
        """Return ``num`` requests."""
        rng = np.random.default_rng((seed, 0))
        prefixes = [maker.draw(rng, self.prefix_len) for _ in range(self.num_groups)]
        lengths = _lengths(rng, self.input_len, num), _lengths(rng, self.output_len, num)
        groups = rng.permutation(np.arange(num) % self.num_groups).tolist()
        return [
            WorkItem(maker.join(prefixes[group] + maker.draw(rng, inputs)), outputs)
            for group, inputs, outputs in zip(groups, *lengths, strict=True)
        ]


class TraceLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a trace file.

    Attributes:
        timestamp: when the request came, in the trace's unit of time.
        prompt: what it asked; or else
        input_length: how many tokens that was, and
        hash_ids: numbers of its blocks of 512 tokens: equal numbers are equal text.
        output_length: tokens that were generated.
    """

    timestamp: float | None = None
    prompt: str | list[int] | None = None
    input_length: int | None = None
    output_length: int | None = None
    hash_ids: list[int] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests that were recorded.

    Attributes:
        path: JSON lines; see ``TraceLine``.
        unit_s: seconds of one unit of ``timestamp``.
        speedup: how much faster than recorded they come.
        output_len: for lines without ``output_length``.
    """

    path: Path
    unit_s: float
    speedup: float
    output_len: Range

    def items(self, num: int | None, maker: PromptMaker, seed: int) -> list[WorkItem]:
        """Return the first ``num`` requests of the file, or all, in order of time.

        Raises:
            SettingsError: the file cannot be read, or a line is wrong.
        """
        lines = list(self._lines(num))
        if not lines:
            raise SettingsError(f"--trace-file {str(self.path)!r} has no lines")
        timed = sum(line.timestamp is not None for line in lines)
        if 0 < timed < len(lines):
            raise SettingsError(
                f"--trace-file {str(self.path)!r}: {timed} of {len(lines)} lines have a "
                "timestamp; give it to all of them or to none"
            )
        lines.sort(key=lambda line: line.timestamp or 0.0)
        first = lines[0].timestamp or 0.0
        scale = self.unit_s / self.speedup
        rng = np.random.default_rng((seed, 0))
        default_len = _lengths(rng, self.output_len, len(lines))
        return [
            WorkItem(
                _trace_prompt(line, maker, rng, seed),
                line.output_length or default,
                None if line.timestamp is None else (line.timestamp - first) * scale,
            )
            for line, default in zip(lines, default_len, strict=True)
        ]

    def _lines(self, num: int | None) -> Iterator[TraceLine]:
        try:
            text = self.path.read_bytes()
        except OSError as error:
            raise SettingsError(f"--trace-file {str(self.path)!r}: {error.strerror}") from error
        decoder = msgspec.json.Decoder(TraceLine)
        found = 0
        for number, raw in enumerate(text.splitlines(), start=1):
            if not raw.strip():
                continue
            if found == num:
                return
            found += 1
            try:
                line = decoder.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise SettingsError(f"{self.path}, line {number}: {error}") from error
            if problem := _problem(line):
                raise SettingsError(f"{self.path}, line {number}: {problem}")
            yield line


Dataset = RandomPrompts | SharedPrefixes | Trace


def _problem(line: TraceLine) -> str | None:
    if (line.prompt is None) == (line.input_length is None):
        return "either prompt or input_length is needed"
    if line.prompt is not None and not line.prompt:
        return "prompt is empty"
    for name in ("input_length", "output_length"):
        value: Any = getattr(line, name)
        if value is not None and value < 1:
            return f"{name} must be at least 1, got {value}"
    if line.hash_ids and (line.prompt is not None or min(line.hash_ids) < 0):
        return "hash_ids are numbers of at least 0, and belong to lines with input_length"
    return None


def _trace_prompt(
    line: TraceLine, maker: PromptMaker, rng: np.random.Generator, seed: int
) -> str | list[int]:
    """Return a line's own prompt, or a random one whose blocks are those of its ``hash_ids``."""
    if line.prompt is not None:
        return line.prompt
    length = line.input_length or 1
    pieces: list[int] = []
    for block in line.hash_ids[: -(-length // TRACE_BLOCK)]:
        pieces += maker.draw(np.random.default_rng((seed, 1, block)), TRACE_BLOCK)
    pieces = pieces[:length]
    return maker.join(pieces + maker.draw(rng, length - len(pieces)))


def _lengths(rng: np.random.Generator, bounds: Range, num: int) -> list[int]:
    drawn: list[int] = rng.integers(bounds[0], bounds[1] + 1, num).tolist()
    return drawn
