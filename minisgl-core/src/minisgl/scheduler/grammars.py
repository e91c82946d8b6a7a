"""Requests whose text must match a grammar: how they wait for it, and what may come next."""

import logging
import time
from collections.abc import Iterable
from typing import Final

import numpy as np

from minisgl.engine.info import EngineInfo
from minisgl.errors import RequestError, without_messages
from minisgl.message import Failure
from minisgl.request import MAX_BAD_TOKENS, FinishReason, SamplingParams
from minisgl.scheduler.controls import BAN
from minisgl.scheduler.request_state import GrammarState, RequestState
from minisgl.structured.compiler import Compilation, GrammarCompiler
from minisgl.structured.interface import CompiledGrammar, MaskArray, Matcher, mask_words
from minisgl.structured.reasoning import ReasoningMatcher

logger = logging.getLogger(__name__)
logger.addFilter(without_messages)

BUDGET_S: Final = 0.5
BUDGET_OF_A_TOKEN_S: Final = 0.005
"""CPU time that a grammar may take of the scheduler's thread, in all and with each token, in
seconds. A request that takes more ends: every other one has to wait for it. Usual grammars take
hundredths of that; with ambiguous ones the time grows with a power of the length of the text."""

Ending = FinishReason | Failure
"""How a request ends because of its grammar: its text is complete, or something went wrong."""


class Grammars:
    """Compiles grammars beside the loop, and fills masks and follows texts in it.

    Args:
        compiler: compiles.
        info: of the engine: its vocabulary, and the tokens that end a text.
    """

    def __init__(self, compiler: GrammarCompiler, info: EngineInfo) -> None:
        self._compiler = compiler
        self._vocab_size = info.vocab_size
        self.num_words = mask_words(info.vocab_size)
        self._nothing = self._bits(())
        self._eos = self._bits(info.eos_token_ids)
        self._outside = ~self._bits(range(info.vocab_size))
        self._compiling: dict[int, tuple[RequestState, Compilation]] = {}
        self.num_waiting_tokens = 0
        """Prompt tokens of the requests that wait for their grammar."""

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._compiling)

    def begin(self, request: RequestState) -> Failure | None:
        """Let ``request`` wait for its grammar, or return why it cannot have one."""
        assert request.params.grammar is not None, "the request asks for a grammar"
        try:
            compilation = self._compiler.submit(
                request.params.grammar, wants_vocabulary=request.params.reasoning is not None
            )
        except RequestError as error:
            return _failure(error)
        self._compiling[request.uid] = request, compilation
        self.num_waiting_tokens += request.num_prompt_tokens
        request.compiling = True
        return None

    def forget(self, request: RequestState) -> None:
        """``request`` has ended while it waited."""
        _, compilation = self._compiling.pop(request.uid)
        self.num_waiting_tokens -= request.num_prompt_tokens
        request.compiling = False
        self._compiler.leave(compilation)

    def take_compiled(self) -> list[tuple[RequestState, Failure | None]]:
        """Return the requests that wait no more, in the order in which they came, and what failed.

        They have their ``GrammarState`` now, unless something failed.
        """
        self._compiler.poll()
        done = [pair for pair in self._compiling.values() if pair[1].done]
        taken: list[tuple[RequestState, Failure | None]] = []
        for request, compilation in done:
            del self._compiling[request.uid]
            self.num_waiting_tokens -= request.num_prompt_tokens
            request.compiling = False
            if compilation.grammar is None:
                assert compilation.error is not None, "a compilation has one result"
                taken.append((request, _failure(compilation.error)))
                continue
            taken.append((request, self._open(request, compilation.grammar)))
        return taken

    def wait(self, timeout: float) -> None:
        """Sleep until a grammar is compiled, at most ``timeout`` seconds."""
        self._compiler.wait(timeout)

    def fill(self, request: RequestState, num_output: int, mask: MaskArray) -> Ending | None:
        """Write which tokens may come next; returns how the request ends instead, if it does.

        Args:
            request: one whose output is committed to its last token.
            num_output: tokens of that.
            mask: int32 ``[num_words]``.
        """
        state = request.grammar
        assert state is not None, "the request has a grammar"
        began = time.thread_time()
        try:
            state.matcher.fill_mask(mask)
        except Exception as error:
            logger.exception("the grammar of request %d failed", request.uid)
            return _broken(error)
        state.spent_s += time.thread_time() - began
        if state.spent_s > BUDGET_S + BUDGET_OF_A_TOKEN_S * num_output:
            return _wrong(
                f"it has taken {state.spent_s:.1f} s to follow {num_output} tokens; make it less "
                "ambiguous"
            )
        mask &= ~self._outside
        may_end, may_go_on = bool((mask & self._eos).any()), bool(mask.any())
        mask &= ~state.never
        for *before, last in state.bad:
            if state.recent[-len(before) :] == before:
                mask[last // 32] &= ~np.int32(np.uint32(1 << last % 32).view(np.int32))
        if num_output < request.params.min_tokens:
            mask &= ~state.early
        if mask.any():
            return None
        if may_end:  # only the end may come, and the request does not obey end-of-sequence tokens
            return FinishReason.STOP
        if may_go_on:
            return _wrong(
                "logit_bias, bad_words, allowed_token_ids, min_tokens and ignore_eos leave none of "
                "the tokens that may come next",
                status=400,
            )
        return _wrong("no token may come next")

    def accept(self, request: RequestState, token: int) -> Ending | None:
        """Take note of the next token of the output; returns how the request ends, if it does."""
        state = request.grammar
        assert state is not None, "the request has a grammar"
        began = time.thread_time()
        try:
            accepted = state.matcher.accept(token)
            finished = state.matcher.finished
        except Exception as error:
            logger.exception("the grammar of request %d failed", request.uid)
            return _broken(error)
        state.spent_s += time.thread_time() - began
        if not accepted:
            return _wrong(f"the token {token} came, which it does not allow")
        if state.bad:
            state.recent = [*state.recent, token][-MAX_BAD_TOKENS:]
        return FinishReason.STOP if finished else None

    def _open(self, request: RequestState, grammar: CompiledGrammar) -> Failure | None:
        params = request.params
        never = self._eos if params.ignore_eos else self._nothing
        if params.allowed_token_ids is not None:
            never = never | ~self._bits(params.allowed_token_ids)
        banned = [token for token, bias in params.logit_bias.items() if bias == BAN]
        banned += [one[0] for one in params.bad_token_ids if len(one) == 1]
        if banned:  # the device forbids them, too: here it shows when nothing else is left
            never = never | self._bits(banned)
        bad = [one for one in params.bad_token_ids if len(one) > 1]
        early = self._nothing
        if params.min_tokens:
            early = self._eos | self._bits(request.stop_token_ids)
        try:
            matcher = self._after_reasoning(params, grammar.matcher())
            request.grammar = GrammarState(matcher, never, early, bad)
        except Exception as error:
            logger.exception("the grammar of request %d failed", request.uid)
            return _broken(error)
        return None

    def _after_reasoning(self, params: SamplingParams, matcher: Matcher) -> Matcher:
        """Return a matcher that lets reasoning pass first, if the request may reason."""
        tags, vocabulary = params.reasoning, self._compiler.vocabulary
        if tags is None:
            return matcher
        assert vocabulary is not None, "the request has waited for it"
        return ReasoningMatcher(matcher, vocabulary.rules(tags.begin, tags.end), tags, self._eos)

    def _bits(self, tokens: Iterable[int]) -> MaskArray:
        """Return a mask with the bits of these tokens, as far as they are in the vocabulary."""
        flags = np.zeros(mask_words(self._vocab_size) * 32, dtype=np.uint8)
        flags[[token for token in tokens if token < self._vocab_size]] = 1
        return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)


def _failure(error: RequestError) -> Failure:
    return Failure(error.message, error.status, error.param, error.code)


def _broken(error: Exception) -> Failure:
    return Failure(f"the grammar engine failed: {error}", status=500, param="grammar")


def _wrong(what: str, status: int = 500) -> Failure:
    message = f"the grammar cannot be obeyed any further: {what}"
    return Failure(message, status=status, param="grammar")
