"""Finds stop strings in text that arrives in pieces, and says what may be sent meanwhile.

The result does not depend on how the text is cut: it is read character by character, and the
first position where any stop string ends counts (the longest, if several end there).
"""

from collections.abc import Sequence


class _Matcher:
    """Knuth-Morris-Pratt for one pattern; its failure table grows only as far as text matches."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.num_matched = 0
        self._failure = [0]

    def feed(self, character: str) -> bool:
        """Read one character; return whether the pattern ends with it."""
        pattern, matched = self.pattern, self.num_matched
        if matched == len(pattern):
            matched = self._failure[matched - 1]
        while matched and pattern[matched] != character:
            matched = self._failure[matched - 1]
        if pattern[matched] == character:
            matched += 1
            if matched > len(self._failure):
                self._failure.append(self._fall_back(matched))
        self.num_matched = matched
        return matched == len(pattern)

    @property
    def num_open(self) -> int:
        """Length of the longest end of the text read that a match could still begin with."""
        matched = self.num_matched
        return self._failure[matched - 1] if matched == len(self.pattern) else matched

    def _fall_back(self, length: int) -> int:
        """Return the longest proper border of the pattern's first ``length`` characters."""
        pattern, border = self.pattern, self._failure[length - 2]
        while border and pattern[border] != pattern[length - 1]:
            border = self._failure[border - 1]
        return border + (pattern[border] == pattern[length - 1])


class StopFinder:
    """Watches one request's text.

    Attributes:
        held: text that was read and not returned, because a stop string may begin in it.
        found: the stop string that has ended the text, if one has.
    """

    def __init__(self, stop: Sequence[str], *, include: bool) -> None:
        self._matchers = [_Matcher(pattern) for pattern in stop]
        self._include = include
        self.held = ""
        self.found: str | None = None

    def feed(self, text: str, *, may_stop: bool) -> tuple[str, bool]:
        """Read ``text``; return what may be sent now, and whether a stop string was found.

        Args:
            text: the next piece.
            may_stop: whether a stop string that ends in this piece counts.
        """
        buffer = self.held + text
        for end, character in enumerate(text, start=len(self.held) + 1):
            found = [m for m in self._matchers if m.feed(character)]
            if found and may_stop:
                self.held = ""
                self.found = max((m.pattern for m in found), key=len)
                return buffer[: end if self._include else end - len(self.found)], True
        cut = len(buffer) - max(m.num_open for m in self._matchers)
        self.held = buffer[cut:]
        return buffer[:cut], False

    def ends_within(self, text: str) -> bool:
        """Return whether a stop string would end in ``text``, if it came next; changes nothing."""
        seen = self.held + text
        return any(
            seen.find(m.pattern, max(0, len(self.held) - len(m.pattern) + 1)) >= 0
            for m in self._matchers
        )

    def flush(self) -> str:
        """Return the held text: nothing follows it."""
        held, self.held = self.held, ""
        return held
