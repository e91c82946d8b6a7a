"""Just enough Markdown for tests: code blocks, links and the anchors of headings."""

import re
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block: its language, its text and the line in its file."""

    language: str
    text: str
    line: int


def blocks(path: Path, *languages: str) -> list[Block]:
    """Return the code blocks of a document that are in one of ``languages``."""
    text = path.read_text(encoding="utf-8")
    found = [
        Block(match[1], match[2], text.count("\n", 0, match.start()) + 2)
        for match in _BLOCK.finditer(text)
    ]
    return [block for block in found if block.language in languages]


def links(path: Path) -> list[str]:
    """Return the targets of all relative links, code left out."""
    text = _without_code(path)
    return [target for target in _LINK.findall(text) if "://" not in target]


def anchors(path: Path) -> set[str]:
    """Return the anchors that a document's headings get where it is shown."""
    found = set()
    for heading in _HEADING.findall(_BLOCK.sub("", path.read_text(encoding="utf-8"))):
        plain = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(plain.replace(" ", "-"))
    return found


def _without_code(path: Path) -> str:
    text = _BLOCK.sub("", path.read_text(encoding="utf-8"))
    return re.sub(r"`[^`\n]*`", "", text)
