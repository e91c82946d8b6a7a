"""What a grammar engine offers, and what it is given."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from minisgl.request import GrammarSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MaskArray = npt.NDArray[np.int32]
"""One bit a token, in order from the lowest bit of the first word; 1 means that it may come."""


def mask_words(vocab_size: int) -> int:
    """Return the 32-bit words of a mask over ``vocab_size`` tokens."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarContext:
    """What an engine is made for.

    Attributes:
        tokenizer: loads the model's tokenizer, in any process: it can be pickled.
        vocab_size: of the model; tokens of a mask.
        eos_token_ids: the tokens that end a text.
        compile_timeout_s: seconds after which nobody waits for ``compile`` any more. An engine
            that works elsewhere should stop its work then.
    """

    tokenizer: "Callable[[], PreTrainedTokenizerBase]"
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    compile_timeout_s: float


class Matcher(Protocol):
    """Follows the text of one request, token by token; used by the scheduler's thread alone.

    An exception, or a mask without any token, ends the request with an error, and no other one.
    """

    @property
    def finished(self) -> bool:
        """Whether the text is over: not even an end-of-sequence token has to come."""
        ...

    def fill_mask(self, mask: MaskArray) -> None:
        """Write which tokens may come next; quick, since a step waits for it.

        End-of-sequence tokens may come where the text may end. Tokens that are no text
        (``<|im_start|>``) may never come.

        Args:
            mask: int32 ``[mask_words(vocab_size)]``, contiguous, all of it to be written; bits
                beyond the vocabulary do not matter.
        """
        ...

    def accept(self, token_id: int) -> bool:
        """Take the next token of the text; returns whether it could come.

        Called once for each token, in order, end-of-sequence tokens included unless the request
        has ended with them.
        """
        ...


class CompiledGrammar(Protocol):
    """A grammar ready for any number of requests at once."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about, in bytes: the cache of compiled grammars counts it."""
        ...

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of a text."""
        ...


class GrammarBackend(Protocol):
    """A grammar engine. It is made with the first request that needs it, in a thread of its own."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile one grammar, in any of a few threads, which run beside the scheduler's.

        Raises:
            RequestError: the grammar is at fault; ``param`` is ``grammar``, the message says what
                is wrong with it.
            Exception: anything else ends the request with status 500.
        """
        ...

    def close(self) -> None:
        """Stop what runs elsewhere. Safe to call twice."""
        ...
