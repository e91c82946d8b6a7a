"""What waits for one tokenizer: short texts before long ones, and nobody for ever."""

from collections.abc import Iterable, Sequence

from minisgl.message import DetokenizeOnly, TokenizeOnly, TokenizeRequest
from minisgl.tokenizer.answers import BATCH_CHARS
from minisgl.tokenizer.dispatch import work_of

Message = TokenizeRequest | TokenizeOnly | DetokenizeOnly


class Backlog:
    """Messages that have come and are not begun.

    A round has the one that has waited longest, and the smallest others up to ``BATCH_CHARS``: who
    comes with a short text waits for one long text at most, and a long text for one round a place.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Message]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, messages: Iterable[Message]) -> None:
        """Take messages in, in the order in which they came."""
        self._waiting += ((work_of(message), message) for message in messages)

    def forget(self, uids: Iterable[int]) -> list[Message]:
        """Take out the messages with these ids, and return them."""
        gone = set(uids)
        found = [message for _, message in self._waiting if message.uid in gone]
        if found:
            self._waiting = [entry for entry in self._waiting if entry[1].uid not in gone]
        return found

    def take(self) -> Sequence[Message]:
        """Return what is to be done next, and take it out."""
        if not self._waiting:
            return []
        by_size = sorted(range(1, len(self._waiting)), key=lambda place: self._waiting[place][0])
        chosen, size = {0}, 0
        for place in by_size:
            size += self._waiting[place][0]
            if size > BATCH_CHARS:
                break
            chosen.add(place)
        taken = [self._waiting[place][1] for place in sorted(chosen)]
        self._waiting = [e for place, e in enumerate(self._waiting) if place not in chosen]
        return taken
