"""A prefix cache by brute force: what the radix tree must look like from outside."""

Prefix = tuple[int, ...]


class PlainCache:
    """A map from every cached whole-page prefix to its last page, with times and locks.

    Attributes:
        pages: page of each prefix.
        used: time of each prefix's last insertion or lock.
        locked: prefixes that a handle keeps, one entry a lock.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.locked: list[Prefix] = []
        self._clock = 0

    def prefixes(self, tokens: list[int]) -> list[Prefix]:
        """Return all whole-page prefixes, short to long."""
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [tuple(tokens[:end]) for end in ends]

    def match(self, tokens: list[int]) -> list[Prefix]:
        """Return the cached prefixes of ``tokens``, at least one token short of everything."""
        found = []
        for prefix in self.prefixes(tokens[:-1]):
            if prefix not in self.pages:
                break
            found.append(prefix)
        return found

    def insert(self, tokens: list[int], own: list[int]) -> list[int]:
        """Cache whole pages; returns the canonical ones."""
        prefixes = self.prefixes(tokens)
        pages = [self.pages.get(p, page) for p, page in zip(prefixes, own, strict=True)]
        self.pages.update(zip(prefixes, pages, strict=True))
        self._touch(prefixes)
        return pages

    def lock(self, prefixes: list[Prefix]) -> None:
        """Keep a matched path."""
        self._touch(prefixes)
        self.locked.append(prefixes[-1] if prefixes else ())

    def forget(self, pages: list[int]) -> list[Prefix]:
        """Take evicted pages out; returns their prefixes."""
        gone = [prefix for prefix, page in self.pages.items() if page in set(pages)]
        for prefix in gone:
            del self.pages[prefix]
        return gone

    def is_locked(self, prefix: Prefix) -> bool:
        """Return whether a lock at or below ``prefix`` keeps it."""
        return any(held[: len(prefix)] == prefix for held in self.locked)

    @property
    def num_evictable(self) -> int:
        """Prefixes that nothing keeps."""
        return sum(not self.is_locked(prefix) for prefix in self.pages)

    def leaves(self) -> list[Prefix]:
        """Return the prefixes that no longer one continues."""
        inner = {prefix[: -self.page_size] for prefix in self.pages}
        return [prefix for prefix in self.pages if prefix not in inner]

    def _touch(self, prefixes: list[Prefix]) -> None:
        self._clock += 1
        self.used.update(dict.fromkeys(prefixes, self._clock))
