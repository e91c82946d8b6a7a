"""The model as clients see it."""

import time
from dataclasses import dataclass, field
from typing import Any

from minisgl.errors import RequestError
from minisgl.plugins.parsers import AnswerParsers


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

    def check_length(self, text: str, param: str) -> None:
        """Refuse text that must be too long before the tokenizer, which all share, works on it."""
        if self.max_seq_len is None or self.max_chars_per_token is None:
            return
        limit = self.max_seq_len * self.max_chars_per_token
        if len(text) > limit:
            raise RequestError(
                f"{param} has {len(text)} characters; this server takes at most "
                f"{self.max_seq_len} tokens, which are never more than {limit} characters",
                param=param,
                code="context_length_exceeded",
            )
