"""The model as clients see it."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from minisgl.errors import RequestError
from minisgl.plugins.parsers import AnswerParsers

MAX_CHAT_VALUES: Final = 100_000
"""Most JSON values of one chat: the tokenizer takes up to 10 microseconds for each."""
MIN_CHAT_CHARS: Final = 2**20
"""So many characters may a chat have besides its texts in any case: in tools, calls, variables."""


@dataclass(slots=True)
class ServedModel:
    """The model as clients see it.

    Attributes:
        name: what ``/v1/models`` lists and requests may name.
        max_seq_len: most tokens of one sequence; known once the model is loaded.
        max_chars_per_token: most characters that one token stands for; likewise.
        parsers: of its text; known once the tokenizer is loaded.
        created: Unix time of the start, in seconds.
    """

    name: str
    max_seq_len: int | None = None
    max_chars_per_token: int | None = None
    parsers: AnswerParsers = field(default_factory=AnswerParsers)
    created: int = field(default_factory=lambda: int(time.time()))

    def card(self) -> dict[str, Any]:
        """Return the entry of ``/v1/models``."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "minisgl",
            "max_model_len": self.max_seq_len,
        }

    def check_name(self, name: str | None) -> None:
        """Refuse another model's name with 404; no name means this model."""
        if name is not None and name != self.name:
            raise RequestError(
                f"the model {name!r} does not exist; this server has {self.name!r}",
                param="model",
                status=404,
                code="model_not_found",
            )

    def check_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        texts: Iterable[str],
        others: Iterable[Any] = (),
    ) -> None:
        """Refuse a chat that must be too long before the tokenizer, which all share, works on it.

        Args:
            messages: as they were sent.
            texts: of the messages.
            others: what else the template gets.

        Raises:
            RequestError: the texts together are too long for the model, there are more messages
                than tokens, or it is more than templates can be asked to read.
        """
        if self.max_seq_len is not None and len(messages) > self.max_seq_len:
            raise RequestError(
                f"messages holds {len(messages)} messages; this server takes at most "
                f"{self.max_seq_len} tokens, and each message has some",
                param="messages",
                code="context_length_exceeded",
            )
        self._check_num_chars(sum(map(len, texts)), "messages")
        num_values, num_chars = _extent([messages, *others], MAX_CHAT_VALUES)
        if num_values > MAX_CHAT_VALUES:
            raise RequestError(
                f"messages, tools and chat_template_kwargs hold more than {MAX_CHAT_VALUES} JSON "
                "values together, which is what this server takes",
                param="messages",
            )
        limit = max(MIN_CHAT_CHARS, self._max_chars() or 0)
        if num_chars > limit:
            raise RequestError(
                f"messages, tools and chat_template_kwargs hold {num_chars} characters together; "
                f"this server takes at most {limit}",
                param="messages",
            )

    def check_length(self, text: str, param: str) -> None:
        """Refuse text that must be too long before the tokenizer, which all share, works on it."""
        self._check_num_chars(len(text), param)

    def _max_chars(self) -> int | None:
        """Return how many characters the longest sequence can stand for."""
        if self.max_seq_len is None or self.max_chars_per_token is None:
            return None
        return self.max_seq_len * self.max_chars_per_token

    def _check_num_chars(self, number: int, param: str) -> None:
        limit = self._max_chars()
        if limit is not None and number > limit:
            raise RequestError(
                f"{param} has {number} characters; this server takes at most "
                f"{self.max_seq_len} tokens, which are never more than {limit} characters",
                param=param,
                code="context_length_exceeded",
            )


def _extent(value: Any, enough: int) -> tuple[int, int]:
    """Return how many JSON values there are, and characters in all; stops once there are enough."""
    num_values = num_chars = 0
    left = [value]
    while left and num_values <= enough:
        one = left.pop()
        num_values += 1
        if isinstance(one, str):
            num_chars += len(one)
        elif isinstance(one, Mapping):
            num_chars += sum(map(len, one))
            left.extend(one.values())
        elif isinstance(one, list | tuple):
            left.extend(one)
    return num_values, num_chars
