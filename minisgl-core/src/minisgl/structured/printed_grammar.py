r"""What XGrammar 0.2 makes of a JSON schema, as text, where two kinds of its rules are too wide.

- A pattern becomes an automaton of its own, which for alternatives that repeat something may let
  through what none of them means. Such a pattern is passed on as a placeholder, and its rule is
  written here.
- A name that is not declared may be a declared one, written otherwise: ``"\u0061"`` is ``a``. Names
  beyond ASCII are missed even as they are. The rules that tell other names from the declared ones
  are written anew.

XGrammar reads what it prints, but for a byte's code in front of a hexadecimal digit.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

_REGEX: Final = re.compile(r'(\w+) ::= Regex\("(\w+)", json_string=true\)')
_NAMES: Final = re.compile(r'(\w+_addl_key) ::= \(\("\\"" (\w+_addl_key_\d+)\)\)(.*)')
_NODE: Final = re.compile(r"(\w+_addl_key_\d+) ::= (.*)")
_EDGE: Final = re.compile(r'\("((?:[^"\\]|\\.)+)" (\w+_addl_key_\d+)\)')
_ESCAPED: Final = {
    "n": b"\n", "r": b"\r", "t": b"\t", "0": b"\0", "a": b"\a", "b": b"\b", "f": b"\f", "v": b"\v",
    "e": b"\x1b",
}  # fmt: skip
_END: Final = r'("\"")'
_CODE: Final = re.compile(r"((?<!\\)(?:\\\\)*)\\x([0-9a-f]{2})")
_UNESCAPED: Final = r"\0-\x1f\"\\"


class UnknownFormError(Exception):
    """XGrammar prints something else than is known here."""

    def __init__(self) -> None:
        super().__init__("this version of XGrammar prints its grammars in a form that is not known")


def tells_names_apart(grammar: str) -> bool:
    """Return whether a grammar has names beside declared ones, as ``rewritten`` knows them."""
    return any(map(_NAMES.fullmatch, grammar.split("\n")))


def rewritten(grammar: str, rules: Mapping[str, str]) -> str:
    """Return a grammar that is as narrow as its schema.

    Args:
        grammar: as XGrammar prints it.
        rules: of patterns, by the placeholder that the schema has instead.

    Raises:
        UnknownFormError: the grammar is not as it is known.
    """
    lines: list[str] = []
    found = map(_NODE.fullmatch, grammar.split("\n"))
    nodes = {node[1]: node[2] for node in found if node is not None}
    for line in grammar.split("\n"):
        pattern, names = _REGEX.fullmatch(line), _NAMES.fullmatch(line)
        if pattern is not None and pattern[2] in rules:
            lines.append(f"{pattern[1]} ::= {rules[pattern[2]]}")
        elif names is not None:
            trie = _Names()
            for name in _declared(nodes, names[2]):
                trie.add(name)
            lines.append(f'{names[1]} ::= (("\\"" {names[1]}_0)){names[3]}')
            lines += trie.rules(names[1])
        elif _NODE.fullmatch(line) is None:
            lines.append(_CODE.sub(r"\1\\U000000\2", line))
    text = "\n".join(lines)
    if any(placeholder in text for placeholder in rules):
        raise UnknownFormError
    return text


def _declared(nodes: Mapping[str, str], root: str) -> Iterator[str]:
    """Yield the names that XGrammar's rules lead to; their letters are the bytes of UTF-8."""
    waiting = [(root, b"")]
    while waiting:
        node, before = waiting.pop()
        if node not in nodes:
            raise UnknownFormError
        if _END not in nodes[node]:
            try:
                yield before.decode()
            except UnicodeDecodeError as error:
                raise UnknownFormError from error
        for letter, after in _EDGE.findall(nodes[node]):
            waiting.append((after, before + _byte(letter)))


def _byte(letter: str) -> bytes:
    """Return the byte that a letter of a rule stands for."""
    if not letter.startswith("\\"):
        return letter.encode()
    if letter.startswith("\\x"):
        return bytes([int(letter.removeprefix("\\x"), base=16)])
    code = _ESCAPED.get(letter[1])
    if code is None and (letter[1].isalnum() or len(letter) != 2):
        raise UnknownFormError
    return code or letter[1].encode()


@dataclass(slots=True)
class _Names:
    """Names that begin alike.

    Attributes:
        is_name: whether one ends here.
        after: those that go on, by their next character.
    """

    is_name: bool = False
    after: "dict[str, _Names]" = field(default_factory=dict)

    def add(self, name: str) -> None:
        """Add a name."""
        node = self
        for character in name:
            node = node.after.setdefault(character, _Names())
        node.is_name = True

    def rules(self, called: str) -> Iterator[str]:
        """Yield the rules of all other names, up to the closing quote.

        As far as a name is like the beginning of one of these, it has no escapes.
        """
        waiting, num_rules = [(0, self)], 1
        while waiting:
            number, node = waiting.pop()
            branches = [] if node.is_name else [_END]
            others = "".join(f"\\U{ord(character):08x}" for character in sorted(node.after))
            branches.append(f"([^{_UNESCAPED}{others}] basic_string_sub)")
            for character, after in sorted(node.after.items()):
                if (
                    character >= " " and character not in '"\\'
                ):  # the others cannot stand as they are
                    branches.append(f'("\\U{ord(character):08x}" {called}_{num_rules})')
                    waiting.append((num_rules, after))
                    num_rules += 1
            yield f"{called}_{number} ::= ({' | '.join(branches)})"
