"""The fields that ``/v1/chat/completions`` and ``/v1/completions`` share.

Ranges are checked by ``SamplingParams``, for HTTP and ``LLM`` alike; the ones below only document
them in ``/openapi.json``, and tests hold the two together.
"""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from pydantic import Field

from minisgl.errors import RequestError
from minisgl.request import (
    MAX_BAD_WORDS,
    MAX_CACHE_SALT,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_WHOLE,
    MIN_REPETITION_PENALTY,
    MIN_SEED,
    SamplingParams,
)
from minisgl.server.errors import in_words_of
from minisgl.server.fields import Nested, NotOffered, Timeout, shortened
from minisgl.server.openai.grammar_fields import GrammarFields

MAX_CHOICES: Final = 128
"""Most choices of one request, as OpenAI documents for ``n``; a batch has them for each prompt."""

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model shall think; its chat template decides what that means."""

MAX_SEQUENCES: Final = 2048
"""Most prompts times choices of one request."""

NOT_OFFERED: Final[Mapping[str, NotOffered]] = {
    "use_beam_search": NotOffered("beam search keeps several answers a row", (False,)),
    "length_penalty": NotOffered("it belongs to beam search", (1,)),
    "lora_path": NotOffered("this server has no adapters"),
    "truncate_prompt_tokens": NotOffered("send the prompt as it shall be read"),
    "prompt_embeds": NotOffered("prompts are text or token ids"),
    "stop_regex": NotOffered("use stop, or a grammar"),
    "logits_processors": NotOffered("it would run code that a client sends"),
    "spaces_between_special_tokens": NotOffered("the tokenizer decides", (True,)),
    "guided_decoding_backend": NotOffered("the server chooses the grammar backend"),
    "guided_whitespace_pattern": NotOffered("the grammar backend decides on white space"),
}


def documented(**limits: Any) -> Any:
    """Return a pydantic field whose limits only appear in the documentation."""
    return Field(json_schema_extra=limits)


class StreamOptions(Nested):
    """``stream_options``."""

    include_usage: bool = False
    """Send the token counts in one more chunk at the end, whose ``choices`` are empty."""
    include_obfuscation: Literal[False] = False
    """Padding against eavesdroppers who measure chunks; not offered."""
    continuous_usage_stats: bool = False
    """Send the token counts so far with every chunk; needs ``include_usage``."""


class GenerationFields(GrammarFields):
    """What both endpoints take."""

    model: str | None = None
    """Name of the model, as ``/v1/models`` lists it; by default, the one that is served."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    """Answers to each prompt. With ``seed``, each of them has a noise of its own, again and again
    the same."""
    max_tokens: Annotated[int | None, documented(minimum=1, maximum=MAX_WHOLE)] = None
    """Most tokens to generate."""
    temperature: Annotated[float, documented(minimum=0, maximum=100)] = 1.0
    """0 takes the likeliest token; above, logits are divided by it before a token is drawn."""
    top_p: Annotated[float, documented(exclusiveMinimum=0, maximum=1)] = 1.0
    """Draw from the smallest set of tokens whose probability reaches this."""
    top_k: Annotated[int, documented(minimum=-1, maximum=MAX_WHOLE)] = -1
    """Draw among this many of the likeliest tokens only; -1 and 0 mean all."""
    min_p: Annotated[float, documented(minimum=0, maximum=1)] = 0.0
    """Drop tokens less likely than this fraction of the likeliest one's probability."""
    seed: Annotated[int | None, documented(minimum=MIN_SEED, maximum=MAX_SEED)] = None
    """Makes the noise of the answer reproducible, whatever else runs."""
    stop: Annotated[str | list[str] | None, documented(maxItems=MAX_STOP_STRINGS, minLength=1)] = (
        None
    )
    """A string or strings that end the text; neither they nor what follows is returned."""
    stop_token_ids: Annotated[list[int] | None, documented(maxItems=MAX_STOP_TOKEN_IDS)] = None
    """Tokens that end the text, beside the model's own."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    min_tokens: Annotated[int, documented(minimum=0, maximum=MAX_WHOLE)] = 0
    """Nothing ends the text before this many tokens."""
    ignore_eos: bool = False
    """The model's own end-of-sequence tokens do not end the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    presence_penalty: Annotated[float, documented(minimum=-2, maximum=2)] = 0.0
    """Subtracted from the logits of tokens that the answer holds already."""
    frequency_penalty: Annotated[float, documented(minimum=-2, maximum=2)] = 0.0
    """Subtracted once for each time that the answer holds a token already."""
    repetition_penalty: Annotated[
        float, documented(minimum=MIN_REPETITION_PENALTY, maximum=MAX_REPETITION_PENALTY)
    ] = 1.0
    """Divides positive and multiplies negative logits of tokens of prompt and answer."""
    logit_bias: Annotated[dict[str, float] | None, documented(maxProperties=MAX_LOGIT_BIAS)] = None
    """Token ids, as strings, with what is added to their logits, from -100 (never) to 100."""
    bad_words: Annotated[list[str] | None, documented(maxItems=MAX_BAD_WORDS)] = None
    """Texts that must not appear, as far as tokens can tell: others may spell the same text."""
    allowed_token_ids: Annotated[list[int] | None, documented(minItems=1)] = None
    """Only these tokens are possible."""
    prompt_logprobs: Annotated[int | None, documented(minimum=0, maximum=MAX_LOGPROBS)] = None
    """Return the log-probability of each token of the prompt, and of this many alternatives."""
    return_token_ids: bool = False
    """Return ``prompt_token_ids`` and ``token_ids`` beside the text."""
    stream: bool = False
    """Send the answer as server-sent events while it comes."""
    stream_options: StreamOptions | None = None
    """Only with ``stream``."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """A higher number is served earlier, and retracted later when the KV pool is full."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)] | None = None
    """Only requests with the same one share cached prefixes."""
    timeout: Timeout | None = None
    """Seconds that the answer may take in all; then it ends with 504."""
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,256}$")] | None = None
    """The client's name for the request: part of the answer's ``id``, and its ``X-Request-Id``
    unless the request has that header."""
    user: str | None = None
    """A label for the client's own accounting; without effect."""
    metadata: dict[str, Any] | None = None
    """Labels for the client's own accounting; without effect."""
    service_tier: str | None = None
    """Without effect: this server has one tier."""
    safety_identifier: str | None = None
    """A label; without effect."""
    prompt_cache_key: str | None = None
    """Without effect: every prefix is looked up; ``cache_salt`` keeps clients apart."""
    prompt_cache_options: dict[str, Any] | None = None
    """Without effect: every prefix is looked up, and kept in memory while there is room."""
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    """Without effect: it bounds how long a prefix is kept, which here is while there is room."""

    not_offered: ClassVar[Mapping[str, NotOffered]] = NOT_OFFERED

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        options = self.stream_options
        return options is not None and options.continuous_usage_stats

    @property
    def wants_prompt(self) -> bool:
        """Whether the answer needs the prompt's tokens."""
        return self.return_token_ids

    def check_together(self) -> None:
        """Refuse fields that contradict one another.

        Raises:
            RequestError: they do.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is only allowed when stream is true", param="stream_options"
            )
        options = self.stream_options
        if options is not None and options.continuous_usage_stats and not options.include_usage:
            raise RequestError(
                "stream_options.continuous_usage_stats=true needs include_usage=true",
                param="stream_options.continuous_usage_stats",
            )

    def engine_names(self) -> dict[str, str]:
        """Return the client's names of fields, by those of the engine where they differ."""
        field = self.grammar_field()
        return {} if field is None else {"grammar": field}

    def params(self, **changes: Any) -> SamplingParams:
        """Return the sampling parameters of the shared fields, with ``changes``.

        Raises:
            RequestError: one is outside its range.
        """
        values: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": _biases(self.logit_bias or {}),
            "bad_words": tuple(self.bad_words or ()),
            "allowed_token_ids": (
                None if self.allowed_token_ids is None else tuple(self.allowed_token_ids)
            ),
            "prompt_logprobs": self.prompt_logprobs,
            "return_prompt": self.wants_prompt,
            "grammar": self.grammar(),
        }
        with in_words_of(self.engine_names()):
            return SamplingParams(**(values | changes))


def choice_params(params: SamplingParams, number: int) -> SamplingParams:
    """Return the parameters of one of ``n`` answers, counted from 0.

    A seeded request gives each answer a seed of its own that depends on nothing else, so that the
    first one equals the answer to the same request with ``n`` = 1.
    """
    if params.seed is None or number == 0:
        return params
    digest = hashlib.blake2b(f"{params.seed} {number}".encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") & MAX_SEED
    return msgspec.structs.replace(params, seed=seed)


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    """Return the biases by token id.

    Raises:
        RequestError: a key is no token id.
    """
    by_token: dict[int, float] = {}
    for key, value in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_WHOLE):
            raise RequestError(
                f"the keys of logit_bias must be token ids from 0 to {MAX_WHOLE}, "
                f"got {shortened(key)}",
                param="logit_bias",
            )
        if int(key) in by_token:
            raise RequestError(f"logit_bias names token {int(key)} twice", param="logit_bias")
        by_token[int(key)] = value
    return by_token
