"""Keeps control tokens that a client writes from being control tokens.

A chat template writes tokens such as ``<|im_end|>``; a client who writes the same characters means
text. Both end up in one rendered string. So, where a client's strings could make up such a token
(``is_suspect``), they are rendered once more with marks around what is theirs (``marked``). If
taking the marks out gives the first rendering, they show which tokens are the client's
(``foreign``). ``encode`` then takes a copy of the tokenizer that knows the control tokens only by
other names, which stand in the text where the template wrote them: everything else is text to it,
and segments, spaces and normalisation are those of the original.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from minisgl.errors import RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

ALIAS_LEAD: Final = "\U0010fd00"
"""Begins the copy's names of control tokens; private, so no text of anybody's language."""

MARKS: Final = range(0x10600, 0x10700)
"""Letters of Linear A: three that a text does not hold become marks in it.

Templates that write a list as Python does would escape characters that cannot be printed.
"""

KNOWN_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})

_TAG = re.compile(r"</?[A-Za-z][\w-]*>")

Span = tuple[int, int]


class ControlTokens:
    """The control tokens of one tokenizer and chat template.

    They are its special tokens, and those other added tokens that the template writes, but for tags
    such as ``<think>`` or ``<tool_call>``: models write those in their answers, and clients send
    the answers back.

    Args:
        tokenizer: of the model.
        template: the source of its chat template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: str) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        names = {
            token.content
            for token in added
            if token.special or (token.content in template and not _TAG.fullmatch(token.content))
        }
        self.names: tuple[str, ...] = tuple(sorted(n for n in names if n and not n.isspace()))
        longest_first = sorted(self.names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._heads = {name[:i] for name in self.names for i in range(1, len(name))}
        self._tails = {name[i:] for name in self.names for i in range(1, len(name))}
        self._longest_part = max(map(len, self._heads), default=0)

    def is_suspect(self, text: str, key: str = "") -> bool:
        """Return whether a client's string holds a control token, or could be a part of one.

        Args:
            text: the string.
            key: of the object that holds it; known roles and types are the template's words.
        """
        if key == "role":
            return text not in KNOWN_ROLES and self._is_part(text)
        if self._pattern.search(text):
            return True
        if key == "type":
            return False
        core = text.strip()
        return self._may_continue_one(core) or self._may_begin_one(core)

    def _may_continue_one(self, text: str) -> bool:
        return any(text[:i] in self._tails for i in range(1, self._longest_part + 1))

    def _may_begin_one(self, text: str) -> bool:
        return any(text[-i:] in self._heads for i in range(1, self._longest_part + 1))

    def _is_part(self, text: str) -> bool:
        return bool(self._pattern.search(text)) or any(text in name for name in self.names)

    def suspects(self, value: Any, key: str = "") -> bool:
        """Return whether any string of a JSON value is suspect, keys of objects included."""
        if isinstance(value, str):
            return self.is_suspect(value, key)
        if isinstance(value, Mapping):
            return any(
                self._pattern.search(str(name)) is not None or self.suspects(item, name)
                for name, item in value.items()
            )
        return isinstance(value, list | tuple) and any(self.suspects(item, key) for item in value)

    def first(self, value: Any) -> str | None:
        """Return the first control token in the strings of a JSON value, if there is one."""
        if isinstance(value, str):
            found = self._pattern.search(value)
            return found[0] if found else None
        if isinstance(value, Mapping):
            value = [item for pair in value.items() for item in pair]
        items = value if isinstance(value, list | tuple) else ()
        return next((token for item in items if (token := self.first(item)) is not None), None)

    def marked(self, value: Any, marks: "Marks", key: str = "") -> Any:
        """Return a JSON value with marks in every suspect string.

        Tokens are put between ``marks.begin`` and ``marks.end``; where a string may be continued to
        a token, ``marks.edge`` stands, inside the white space around the string: templates trim.
        """
        if isinstance(value, str):
            return self._marked_text(value, marks, key) if self.is_suspect(value, key) else value
        if isinstance(value, Mapping):
            return {
                self._wrapped(str(name), marks): self.marked(item, marks, name)
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.marked(item, marks, key) for item in value]
        return value

    def _wrapped(self, text: str, marks: "Marks") -> str:
        return self._pattern.sub(lambda match: f"{marks.begin}{match[0]}{marks.end}", text)

    def _marked_text(self, text: str, marks: "Marks", key: str) -> str:
        core = text.strip()
        at = text.find(core)
        before = marks.edge if key == "role" or self._may_continue_one(core) else ""
        after = marks.edge if key == "role" or self._may_begin_one(core) else ""
        wrapped = self._wrapped(core, marks)
        return f"{text[:at]}{before}{wrapped}{after}{text[at + len(core) :]}"

    def foreign(self, text: str, marked: str, marks: "Marks") -> list[Span] | None:
        """Return where in ``text`` control tokens stand that are not wholly the template's.

        Args:
            text: the rendering without marks.
            marked: the rendering with marks.
            marks: that were used.

        Returns:
            The places, or ``None`` if the two differ in more than the marks: nobody can tell then.
        """
        inside, edges, plain = marks.read(marked)
        if plain != text:
            return None
        found: list[Span] = []
        ends = [end for _, end in inside]
        for match in self._pattern.finditer(text):
            start, stop = match.span()
            after = bisect_right(ends, start)  # the first span that ends behind the token's start
            overlaps = after < len(inside) and inside[after][0] < stop
            edge = bisect_right(edges, start)
            if overlaps or (edge < len(edges) and edges[edge] < stop):
                found.append((start, stop))
        return found

    def encode(self, text: str, foreign: Iterable[Span]) -> list[int]:
        """Return the ids of rendered text in which the ``foreign`` tokens are text.

        Raises:
            RequestError: this tokenizer makes the token of its text in any case.
        """
        if ALIAS_LEAD in text:
            raise RequestError(
                f"the messages hold the private character {ALIAS_LEAD!r} beside text that reads "
                "like a control token; leave one of them out",
                param="messages",
            )
        left_alone = set(foreign)
        pieces: list[str] = []
        done, num_written = 0, 0
        unknown = self._tokenizer.unk_token
        for match in self._pattern.finditer(text):
            if match.span() not in left_alone:
                pieces += [text[done : match.start()], self._aliases[match[0]]]
                done = match.end()
                num_written += match[0] != unknown
        pieces.append(text[done:])
        copy, original = self._copy
        # In a batch, even of one, it lets other threads run.
        [encoding] = copy.encode_batch(["".join(pieces)], add_special_tokens=False)
        ids = encoding.ids
        counted = original.keys() - {copy.token_to_id(self._aliases.get(str(unknown), ""))}
        if sum(token_id in counted for token_id in ids) != num_written:
            raise RequestError(
                "this model's tokenizer cannot write a control token as text; leave it out of the "
                "messages",
                param="messages",
            )
        others = self._other_ids
        return [original.get(token_id, others.get(token_id, token_id)) for token_id in ids]

    @cached_property
    def _aliases(self) -> dict[str, str]:
        return {
            name: f"{ALIAS_LEAD}{chr(0x10FE00 + i // 256)}{chr(0x10FE00 + i % 256)}"
            for i, name in enumerate(self.names)
        }

    @cached_property
    def _copy(self) -> "tuple[Tokenizer, dict[int, int]]":
        """The tokenizer with other names for control tokens, and the true ids of those."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RequestError(
                "this model's tokenizer cannot write control tokens as text; leave them out of the "
                "messages",
                param="messages",
            )
        from tokenizers import Tokenizer

        copy = Tokenizer.from_str(json.dumps(_renamed(json.loads(backend.to_str()), self._aliases)))
        original: dict[int, int] = {
            copy.token_to_id(alias): backend.token_to_id(name)  # type: ignore[misc]
            for name, alias in self._aliases.items()
        }
        return copy, original

    @cached_property
    def _other_ids(self) -> dict[int, int]:
        """The true ids of added tokens that are no control tokens, where the copy's differ."""
        copy, _ = self._copy
        backend = self._tokenizer.backend_tokenizer
        return {
            copy.token_to_id(token.content): token_id  # type: ignore[misc]
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.content not in self._aliases
        }


class Marks:
    """Three characters that ``text`` does not hold.

    Raises:
        RequestError: it holds all letters of Linear A.
    """

    def __init__(self, text: str) -> None:
        unused = [chr(code) for code in MARKS if chr(code) not in text][:3]
        if len(unused) < 3:
            raise RequestError(
                "the messages hold text that reads like a control token beside all of Linear A",
                param="messages",
            )
        self.begin, self.end, self.edge = unused

    def read(self, marked: str) -> tuple[list[Span], list[int], str]:
        """Return the spans and the places that are marked in text, and the text without marks.

        A template may cut between two marks; what is left of them are places.
        """
        spans: list[Span] = []
        edges: list[int] = []
        pieces: list[str] = []
        begun: int | None = None
        at = 0
        for piece in re.split(f"([{self.begin}{self.end}{self.edge}])", marked):
            if piece not in (self.begin, self.end, self.edge):
                pieces.append(piece)
                at += len(piece)
                continue
            edges.append(at)
            if piece == self.end and begun is not None:
                spans.append((begun, at))
            begun = at if piece == self.begin else None
        return spans, edges, "".join(pieces)


def _renamed(state: dict[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return a tokenizer's JSON with other names for some added tokens, in its vocabulary too.

    A model that finds a token's name in its vocabulary may take it for one piece of text.
    """
    for token in state["added_tokens"]:
        token["content"] = aliases.get(token["content"], token["content"])
    model = state["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {aliases.get(name, name): i for name, i in vocabulary.items()}
    elif vocabulary is not None:  # Unigram: pairs of piece and score
        model["vocab"] = [[aliases.get(name, name), score] for name, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = aliases.get(model["unk_token"], model["unk_token"])
    return state | {"post_processor": None, "truncation": None, "padding": None}
