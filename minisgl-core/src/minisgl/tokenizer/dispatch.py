"""Spreads requests over several tokenizer processes: the one with the least left to do gets each.

What is left is what was sent to it less what it has done. That it writes into a word of memory that
both map, so nobody sends anything back.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from minisgl.message import ForgetRequests, TokenizerMessage

BASE_WORK: Final = 100
"""Of any message or request, in characters."""

_WORD: Final = struct.Struct("<q")


class Sender(Protocol):
    """Where messages go, such as a ``PushSocket``."""

    def send(self, message: Any, /) -> None:
        """Queue the message; must not block."""


class WorkCounter:
    """A number in a file that two processes map; one of them adds to it.

    Args:
        path: of the file; whoever comes first makes it.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, _WORD.size)
            self._memory = mmap.mmap(descriptor, _WORD.size)
        finally:
            os.close(descriptor)

    @property
    def value(self) -> int:
        """The sum so far."""
        return int(_WORD.unpack_from(self._memory)[0])

    def add(self, amount: int) -> None:
        """Add ``amount``; only one process may."""
        _WORD.pack_into(self._memory, 0, self.value + amount)

    def close(self) -> None:
        """Unmap the file."""
        self._memory.close()


class LeastLoaded:
    """Sends each message to the tokenizer with the least left to do.

    Args:
        tokenizers: where each of them is reached.
        done: what each of them has done.
    """

    def __init__(self, tokenizers: Sequence[Sender], done: Sequence[WorkCounter]) -> None:
        self._tokenizers = tokenizers
        self._done = done
        self._sent = [0] * len(tokenizers)

    def send(self, message: TokenizerMessage) -> None:
        """Queue the message for one of them, or for all if it may concern any."""
        if isinstance(message, ForgetRequests):
            for tokenizer in self._tokenizers:
                tokenizer.send(message)
            return
        if len(self._tokenizers) == 1:
            self._tokenizers[0].send(message)
            return
        left = [sent - done.value for sent, done in zip(self._sent, self._done, strict=True)]
        chosen = left.index(min(left))
        self._tokenizers[chosen].send(message)
        self._sent[chosen] += work_of(message)


def work_of(message: TokenizerMessage) -> int:
    """Return about how much work a message is, in characters."""
    prompt = getattr(message, "prompt", None)
    if isinstance(prompt, str):
        return BASE_WORK + len(prompt)
    if not isinstance(prompt, list):
        return BASE_WORK + len(getattr(message, "token_ids", ()))
    if not prompt or not isinstance(prompt[0], dict):
        return BASE_WORK + len(prompt) // 8
    return BASE_WORK + sum(_work_of_message(chat) for chat in prompt)


def _work_of_message(chat: Any) -> int:
    """Return the work of one chat message; anything may have been sent as one."""
    content = chat.get("content") if isinstance(chat, dict) else None
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return BASE_WORK + sum(len(text) for text in texts if isinstance(text, str))
