"""Messages that the scheduler receives."""

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl.message.codec import Count, Uid, check_array
from minisgl.request import SamplingParams


class GenerateRequest(msgspec.Struct, frozen=True, tag="generate"):
    """A tokenised prompt, validated, ready for the waiting queue.

    Attributes:
        uid: the server's own number for the request; a client's id is only a label elsewhere.
        token_ids: the prompt as little-endian int32 bytes.
        params: how to sample and when to stop.
        priority: a higher number is served earlier and retracted later.
        cache_salt: only requests with the same one share cached prefixes.
        prompt_tail: goes to the detokenizer as it is, see ``StreamStart``.
    """

    uid: Uid
    token_ids: bytes
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    prompt_tail: str = ""

    def __post_init__(self) -> None:
        check_array("token_ids", self.token_ids, 4)

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        """The prompt's token ids, int32 ``[n]``."""
        return np.frombuffer(self.token_ids, dtype="<i4")


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """End these requests; an id that is not known yet is remembered for a minute."""

    uids: list[Uid]


class StopFound(msgspec.Struct, frozen=True, tag="stop_found"):
    """The detokenizer found a stop string: the output ends after ``num_tokens`` tokens."""

    uid: Uid
    num_tokens: Count


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Ask the scheduler for its heartbeat; answered by a ``Pong`` to the frontend."""

    sequence: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop the receiving process; with ``drain`` it first finishes what it has accepted."""

    drain: bool = False


BackendMessage = GenerateRequest | AbortRequest | StopFound | Ping | Shutdown
