"""What a user asks of one generation, why one ends, and what is counted about it.

Knows nothing of rows or devices: the scheduler keeps those beside the request.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal, get_args

import msgspec

from minisgl.errors import RequestError

MIN_SEED: Final = -(2**63)
MAX_SEED: Final = 2**63 - 1
MAX_WHOLE: Final = 2**31 - 1
MAX_STOP_STRINGS: Final = 64
MAX_STOP_TOKEN_IDS: Final = 256
MAX_PRIORITY: Final = 2**31 - 1
MAX_CACHE_SALT: Final = 256
"""Characters."""
MAX_LOGPROBS: Final = 20
"""Most alternatives of one token, as OpenAI documents."""
MAX_LOGIT_BIAS: Final = 1024
MIN_REPETITION_PENALTY: Final = 0.01
MAX_REPETITION_PENALTY: Final = 100.0
MAX_BAD_WORDS: Final = 256
MAX_BAD_SEQUENCES: Final = 2 * MAX_BAD_WORDS
"""Each word is banned as it is and behind a space."""
MAX_BAD_TOKENS: Final = 32
"""Tokens of one banned sequence: so many of its last tokens a device remembers of each request."""
MAX_GRAMMAR: Final = 2**20
"""Characters of a schema, expression or grammar."""


class FinishReason(StrEnum):
    """Why a request ended: its one terminal event carries exactly one of these."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """``max_tokens`` or the model's context length was reached."""
    ABORT = "abort"
    """The client went away or asked for it."""
    ERROR = "error"
    """The request failed; the message says how."""


GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


class GrammarSpec(msgspec.Struct, frozen=True):
    """What the text must look like.

    Attributes:
        kind: ``json_object`` (any JSON object), ``json_schema``, ``regex``, ``choice`` (one of some
            strings) or ``grammar`` (EBNF).
        value: the schema as JSON text, the expression, a JSON list of strings, or the grammar;
            empty for ``json_object``.
    """

    kind: GrammarKind
    value: str = ""


class ReasoningTags(msgspec.Struct, frozen=True, omit_defaults=True):
    """Between which tags a model reasons before its answer.

    Attributes:
        begin, end: the tags: printable ASCII without white space.
        implied: the answer begins with reasoning even without an opening tag, unless the prompt
            has a closing one.
        is_open: whether a prompt has opened it; else the answer may do so with its first token.

    Raises:
        ValueError: a tag is not what it should be.
    """

    begin: str
    end: str
    implied: bool = False
    is_open: bool = False

    def __post_init__(self) -> None:
        for tag in (self.begin, self.end):
            if not tag or not all("!" <= character <= "~" for character in tag):
                raise ValueError(f"a tag is printable ASCII without white space, got {tag!r}")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next tokens of one request are chosen and when it ends.

    Immutable and validated on construction, so one object may serve any number of requests.

    Attributes:
        max_tokens: most tokens to generate; ``None`` means all the room that is left.
        temperature: 0 is greedy (argmax); above 0 divides the logits before sampling.
        top_k: sample among the k likeliest tokens only; -1 or 0 means all.
        top_p: sample from the smallest set of tokens whose probability reaches this, in (0, 1].
        min_p: drop tokens less likely than this fraction of the likeliest one's, in [0, 1].
        seed: makes the request's noise a function of (seed, position) alone, in any batch;
            ``None`` draws a fresh one.
        stop: strings that end the text; neither they nor what follows is returned.
        stop_token_ids: tokens that end the text, in addition to the model's own.
        include_stop_str_in_output: keep the stop string at the end of the text.
        min_tokens: end-of-sequence, stop tokens and stop strings are impossible before this many.
        ignore_eos: the model's own end-of-sequence tokens do not end the text.
        skip_special_tokens: leave special tokens out of the text.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens that the output
            holds already, once and once an occurrence (OpenAI), from -2 to 2.
        repetition_penalty: divides positive and multiplies negative logits of tokens that prompt
            or output hold (CTRL, Keskar et al. 2019), from 0.01 to 100; 1 changes nothing.
        logit_bias: added to the logits of these token ids, from -100 to 100; -100 bans a token,
            as OpenAI documents.
        bad_words: texts that must not appear, as far as tokens can tell.
        bad_token_ids: the same as sequences of token ids; the tokenizer fills it from
            ``bad_words``.
        allowed_token_ids: only these are possible; ``None`` allows all.
        logprobs: report the log-probability of every token and of this many alternatives;
            ``None`` reports none.
        prompt_logprobs: the same for the prompt's tokens, which are then all computed again.
        return_prompt: the first reply carries the prompt's token ids and text.
        grammar: what the text must look like.
        reasoning: what may come before that text, if something may.

    Raises:
        RequestError: a field is outside its range; ``param`` names it.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[str, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_prompt: bool = False
    grammar: GrammarSpec | None = None
    reasoning: ReasoningTags | None = None

    def __post_init__(self) -> None:
        _make_tuples(self)
        for name, fine, allowed in (
            (
                "max_tokens",
                _optional(_whole(self.max_tokens, 1), self.max_tokens),
                f"at least 1 and at most {MAX_WHOLE}",
            ),
            ("temperature", _real(self.temperature, 0, 100), "a number from 0 to 100"),
            ("top_k", _whole(self.top_k, -1), f"-1 or 0 (all), or from 1 to {MAX_WHOLE}"),
            ("top_p", _real(self.top_p, 0, 1) and self.top_p > 0, "above 0 and at most 1"),
            ("min_p", _real(self.min_p, 0, 1), "from 0 to 1"),
            (
                "seed",
                _optional(_whole(self.seed, MIN_SEED, MAX_SEED), self.seed),
                f"a whole number from {MIN_SEED} to {MAX_SEED}",
            ),
            ("min_tokens", _whole(self.min_tokens, 0), f"from 0 to {MAX_WHOLE}"),
            (
                "stop",
                _strings(self.stop, MAX_STOP_STRINGS),
                f"at most {MAX_STOP_STRINGS} non-empty strings",
            ),
            (
                "stop_token_ids",
                _token_ids(self.stop_token_ids, MAX_STOP_TOKEN_IDS),
                f"at most {MAX_STOP_TOKEN_IDS} token ids",
            ),
            *_rules_of_logits(self),
        ):
            if not fine:
                value = shortened(getattr(self, name))
                raise RequestError(f"{name} must be {allowed}, got {value}", param=name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                param="min_tokens",
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the argmax: the filters cannot change it then."""
        return self.temperature == 0 or self.top_k == 1


_Rule = tuple[str, bool, str]
"""A field, whether its value is fine, and which values are."""


def _rules_of_logits(params: SamplingParams) -> tuple[_Rule, ...]:
    """Return what must hold for the fields that change logits or report them."""
    penalty, probs = "a number from -2 to 2", f"a whole number from 0 to {MAX_LOGPROBS}"
    asked = params.allowed_token_ids
    return (
        ("presence_penalty", _real(params.presence_penalty, -2, 2), penalty),
        ("frequency_penalty", _real(params.frequency_penalty, -2, 2), penalty),
        (
            "repetition_penalty",
            _real(params.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
            f"a number from {MIN_REPETITION_PENALTY} to {MAX_REPETITION_PENALTY:g}",
        ),
        (
            "logit_bias",
            _biases(params.logit_bias),
            f"at most {MAX_LOGIT_BIAS} token ids, each with a number from -100 to 100",
        ),
        (
            "bad_words",
            _strings(params.bad_words, MAX_BAD_WORDS),
            f"at most {MAX_BAD_WORDS} non-empty strings",
        ),
        (
            "bad_token_ids",
            _sequences(params.bad_token_ids),
            f"at most {MAX_BAD_SEQUENCES} sequences of 1 to {MAX_BAD_TOKENS} token ids",
        ),
        (
            "allowed_token_ids",
            asked is None or (len(asked) > 0 and _token_ids(asked, MAX_WHOLE)),
            "a list of at least one token id",
        ),
        ("logprobs", _optional(_whole(params.logprobs, 0, MAX_LOGPROBS), params.logprobs), probs),
        (
            "prompt_logprobs",
            _optional(_whole(params.prompt_logprobs, 0, MAX_LOGPROBS), params.prompt_logprobs),
            probs,
        ),
        ("return_prompt", isinstance(params.return_prompt, bool), "true or false"),
        (
            "grammar",
            _grammar(params.grammar),
            f"a GrammarSpec ({', '.join(get_args(GrammarKind))}) of up to {MAX_GRAMMAR} characters",
        ),
    )


def _make_tuples(params: SamplingParams) -> None:
    """Accept one string, lists and ``None`` for the fields that hold tuples, as users type them."""
    for name in ("stop", "bad_words"):
        if isinstance(getattr(params, name), str):
            msgspec.structs.force_setattr(params, name, (getattr(params, name),))
    if params.logit_bias is None:
        msgspec.structs.force_setattr(params, "logit_bias", {})
    for name in ("stop", "stop_token_ids", "bad_words", "bad_token_ids", "allowed_token_ids"):
        value = getattr(params, name)
        if value is None and name == "allowed_token_ids":
            continue
        if value is None or isinstance(value, list):
            value = tuple(value or ())
        elif not isinstance(value, tuple):
            raise RequestError(f"{name} must be a list, got {shortened(value)}", param=name)
        if name == "bad_token_ids":
            value = tuple(tuple(one) if isinstance(one, list) else one for one in value)
        msgspec.structs.force_setattr(params, name, value)


def _whole(value: object, low: int, high: int = MAX_WHOLE) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _optional(fine: bool, value: object) -> bool:
    return fine or value is None


def _real(value: object, low: float, high: float) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and low <= value <= high
    )


def _strings(values: tuple[object, ...], most: int) -> bool:
    return len(values) <= most and all(isinstance(s, str) and s for s in values)


def _token_ids(values: tuple[object, ...], most: int) -> bool:
    return len(values) <= most and all(_whole(token, 0) for token in values)


def _sequences(values: tuple[object, ...]) -> bool:
    return len(values) <= MAX_BAD_SEQUENCES and all(
        isinstance(one, tuple) and len(one) > 0 and _token_ids(one, MAX_BAD_TOKENS)
        for one in values
    )


def _grammar(value: object) -> bool:
    return value is None or (
        isinstance(value, GrammarSpec)
        and value.kind in get_args(GrammarKind)
        and isinstance(value.value, str)
        and len(value.value) <= MAX_GRAMMAR
    )


def _biases(values: object) -> bool:
    return (
        isinstance(values, dict)
        and len(values) <= MAX_LOGIT_BIAS
        and all(_whole(token, 0) and _real(bias, -100, 100) for token, bias in values.items())
    )


def shortened(value: object) -> str:
    """Return ``value`` as an error message shows it."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One finished step, for observers.

    Counts of requests, pages and retractions are those of the moment when the step was processed:
    with overlap the next one has been planned by then. A step that fails has no statistics.

    Attributes:
        step: number of the step, from 0.
        num_decode_rows, num_prefill_rows: rows of the step.
        num_prefill_tokens: prompt tokens computed.
        num_running: requests with a row, those that ended with the step included.
        num_waiting: requests in the queue.
        num_free_pages, num_cached_pages, num_pages: of the KV pool.
        num_evictable_pages: cached ones that no running request uses.
        num_queried_tokens: prompt tokens of all requests that were admitted since the start.
        num_cached_tokens: how many of them the prefix cache supplied.
        num_retracted: retractions since the start.
        host_us: host time of planning, launching and processing, in microseconds, without waiting
            for the device, and without the computation itself where a launch does it (on a CPU).
    """

    step: int
    num_decode_rows: int
    num_prefill_rows: int
    num_prefill_tokens: int
    num_running: int
    num_waiting: int
    num_free_pages: int
    num_cached_pages: int
    num_pages: int
    num_evictable_pages: int
    num_queried_tokens: int
    num_cached_tokens: int
    num_retracted: int
    host_us: float

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computed: one a decode row, and the prompts'."""
        return self.num_decode_rows + self.num_prefill_tokens

    @property
    def num_used_pages(self) -> int:
        """Pages that running requests use, shared ones counted once."""
        return self.num_pages - self.num_free_pages - self.num_evictable_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """One finished request, for observers; times in seconds, ``None`` if never reached.

    Attributes:
        uid: the server's number of the request.
        num_prompt_tokens, num_completion_tokens: token counts.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``.
        num_cached_tokens: prompt tokens that the prefix cache supplied.
        queue_time: from arrival to admission.
        prefill_time: from admission to the first committed token.
        time_to_first_token: from arrival to the first committed token.
        inter_token_times: from each committed token to the next; one less than completion tokens.
            Those past a stop string are not among them, as they are not among the tokens.
        total_time: from arrival to the terminal event.
        num_retractions: how often it was retracted.
        extra: for plugins.
    """

    uid: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    finish_reason: str
    queue_time: float | None
    prefill_time: float | None
    time_to_first_token: float | None
    inter_token_times: tuple[float, ...] = ()
    total_time: float
    num_retractions: int
    extra: Mapping[str, Any] = field(default_factory=dict)
