"""A request's life inside the scheduler."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from minisgl.engine.reports import LogprobArrays
from minisgl.kvcache.interface import CacheHandle
from minisgl.message import Failure
from minisgl.request import FinishReason, SamplingParams
from minisgl.structured.interface import MaskArray, Matcher


def _no_gaps() -> npt.NDArray[np.float32]:
    return np.empty(0, dtype=np.float32)


@dataclass(slots=True, eq=False)
class GrammarState:
    """What a request has of its grammar; it survives retractions, since tokens only ever grow.

    Attributes:
        matcher: has accepted every committed token of the output.
        never: int32 ``[words]``: tokens that may come at no time, whatever the grammar says.
        early: int32 ``[words]``: tokens that may not come below ``min_tokens``.
        bad: sequences of token ids of which the last may not follow the others.
        recent: the last tokens of the output, as many as the longest of those needs.
        spent_s: CPU time of the scheduler's thread that the grammar has taken, seconds.
    """

    matcher: Matcher
    never: MaskArray
    early: MaskArray
    bad: list[tuple[int, ...]]
    recent: list[int] = field(default_factory=list)
    spent_s: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class RequestState:
    """One accepted request: waiting (no row), prefilling, or decoding.

    Lengths live in the ``TableManager`` while the request has a row. A terminal reason is set
    once, by whatever ends the request; its row and pages go when none of its launches is
    unprocessed.

    Attributes:
        uid: the server's number.
        order: counts accepted requests up: the age that admission and retraction go by.
        params: what the user asked for.
        priority: a higher number is served earlier and retracted later.
        cache_salt: requests with another one share no cached prefix with this one.
        prompt_tail: for the detokenizer, which hands it on.
        seed: of the request's noise; drawn once, so that a retraction changes nothing.
        num_prompt_tokens: tokens that the user sent.
        max_total_tokens: prompt and output together never exceed it.
        arrival: time of acceptance, seconds of a monotonic clock.
        saved_tokens: int32: prompt and committed output while the request has no row.
        stop_token_ids: the request's own stop tokens.
        row: row of the page table, -1 while waiting.
        handle: locked place in the prefix cache; ``None`` without a row.
        num_shared_pages: leading pages that belong to the cache.
        num_cached_tokens: prompt tokens that the cache supplied at the first admission.
        retracting: not launched any more; goes back to the queue once nothing is in flight.
        terminal: why it ended.
        failure: what went wrong, if it ended with an error.
        num_output_tokens: set with ``terminal``: tokens of the final output.
        skipped: how often a later request was admitted before it.
        first_launch, first_token: times.
        last_token, saved_gaps: what ``TokenTimes`` keeps while the request has no row: the time of
            its newest token, and float32 seconds between its tokens.
        num_retractions: how often it lost its row.
        announced: the detokenizer knows it.
        scored: the log-probabilities of its prompt, if it wants them, have been sent.
        prompt_logprobs: those that are there so far; they begin anew with every row.
        min_pages: pages that its last failed admission asked for.
        compiling: waits for its grammar, outside of the queue.
        grammar: what its text must match, once it is compiled.
        matched_tokens, matched_at: what the prefix cache held of it at which pass of admission, -1
            if it was not looked up; for longest prefix first.
    """

    uid: int
    order: int
    params: SamplingParams
    priority: int
    cache_salt: str | None = None
    prompt_tail: str = ""
    seed: int
    num_prompt_tokens: int
    max_total_tokens: int
    arrival: float
    saved_tokens: npt.NDArray[np.int32]
    stop_token_ids: frozenset[int] = frozenset()
    row: int = -1
    handle: CacheHandle = None
    num_shared_pages: int = 0
    num_cached_tokens: int = 0
    retracting: bool = False
    terminal: FinishReason | None = None
    failure: Failure | None = None
    num_output_tokens: int = 0
    skipped: int = 0
    first_launch: float | None = None
    first_token: float | None = None
    num_retractions: int = 0
    announced: bool = False
    scored: bool = False
    prompt_logprobs: list[LogprobArrays] = field(default_factory=list)
    min_pages: int = 0
    matched_tokens: int = 0
    matched_at: int = -1
    last_token: float = 0.0
    saved_gaps: npt.NDArray[np.float32] = field(default_factory=_no_gaps)
    compiling: bool = False
    grammar: GrammarState | None = None

    @property
    def scores_prompt(self) -> bool:
        """Whether all of its prompt is to be computed, for its log-probabilities."""
        return self.params.prompt_logprobs is not None and not self.scored

    @property
    def admission_key(self) -> tuple[int, int]:
        """Order of the waiting queue: priority first, then age."""
        return (-self.priority, self.order)
