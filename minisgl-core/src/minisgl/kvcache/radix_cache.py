"""A radix tree over pages of tokens (after SGLang's RadixAttention, Zheng et al., 2024).

Every edge is a non-empty whole number of pages. A node stands for the path from the root to it:
a split keeps the old node object as the lower part, so a handle taken before it still yields the
same pages. Locks count on every node of a path; a node whose count is 0 and that has no children
can be evicted, from its end.
"""

import heapq
from collections.abc import Iterator

import numpy as np

from minisgl.kvcache.interface import CacheHandle, Match, PageArray, PrefixCache, TokenArray


class _Node:
    """One edge of the tree and the subtree below it."""

    __slots__ = ("children", "last_used", "locks", "pages", "parent", "queued", "tokens")

    def __init__(self, parent: "_Node | None", tokens: TokenArray, pages: PageArray) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, _Node] = {}
        self.locks = 0
        self.last_used = 0
        self.queued = False


class _Handle:
    """A place in the tree: the path to ``node``, of which ``num_pages`` pages belong to it."""

    __slots__ = ("node", "num_pages")

    def __init__(self, node: _Node, num_pages: int) -> None:
        self.node = node
        self.num_pages = num_pages


class RadixPrefixCache(PrefixCache):
    """Shares pages between requests with equal prefixes; evicts the least recently used.

    Args:
        page_size: tokens a page.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        nothing = np.empty(0, dtype=np.int32)
        self._root = _Node(None, nothing, nothing)
        self._root.locks = 1
        self._clock = 0
        self._num_pages = 0
        self._num_locked_pages = 0
        # Least recently used leaves; an entry whose time is stale is queued again when popped.
        self._leaves: list[tuple[int, int, _Node]] = []
        self._num_queued = 0

    @property
    def num_evictable_pages(self) -> int:
        """Pages outside every locked path: whole unlocked subtrees can go, leaf by leaf."""
        return self._num_pages - self._num_locked_pages

    @property
    def num_pages(self) -> int:
        """Pages in the tree."""
        return self._num_pages

    def match(self, tokens: TokenArray) -> Match:
        """Return the longest cached prefix in whole pages, at most ``len(tokens) - 1`` tokens."""
        limit = max(len(tokens) - 1, 0) // self.page_size
        node, taken, pages = self._walk(tokens, limit)
        return Match(handle=_Handle(node, taken), pages=_join(pages))

    def insert(self, tokens: TokenArray, pages: PageArray) -> Match:
        """Add a sequence of whole pages; returns its canonical pages and handle."""
        num_pages = len(pages)
        assert len(tokens) == num_pages * self.page_size, "only whole pages are cached"
        node, taken, found = self._walk(tokens, num_pages)
        num_found = sum(len(part) for part in found)
        if taken < len(node.pages):
            node = self._split(node, taken)
        if num_found < num_pages:
            start = num_found * self.page_size
            leaf = _Node(node, tokens[start:].copy(), pages[num_found:].copy())
            node.children[self._key(leaf.tokens)] = leaf
            self._num_pages += len(leaf.pages)
            found.append(leaf.pages)
            node = leaf
        self._touch(node)
        self._queue_if_evictable(node)
        return Match(handle=_Handle(node, len(node.pages)), pages=_join(found))

    def lock(self, handle: CacheHandle) -> None:
        """Keep the handle's path; a handle that ends inside an edge splits it here."""
        node: _Node = handle.node
        if handle.num_pages < len(node.pages):
            node = handle.node = self._split(node, handle.num_pages)
        self._touch(node)
        while node.parent is not None:
            if node.locks == 0:
                self._num_locked_pages += len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, handle: CacheHandle) -> None:
        """Undo one lock of the handle's path."""
        node: _Node = handle.node
        while node.parent is not None:
            assert node.locks > 0, "a handle is unlocked no more often than it was locked"
            node.locks -= 1
            if node.locks == 0:
                self._num_locked_pages -= len(node.pages)
                self._queue_if_evictable(node)
            node = node.parent

    def evict(self, num_pages: int) -> list[int]:
        """Forget pages of unlocked leaves, least recently used first, each from its end."""
        evicted: list[int] = []
        while len(evicted) < num_pages and self._leaves:
            time, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if node.locks or node.children or not len(node.pages):
                continue
            if node.last_used != time:
                self._queue_if_evictable(node)
                continue
            evicted.extend(self._shorten(node, num_pages - len(evicted)))
        self._num_pages -= len(evicted)
        return evicted

    def check(self) -> None:
        """Recount pages, locks and edges; raises ``AssertionError`` on any difference."""
        seen: list[int] = []
        locked = 0
        for node in self._nodes():
            assert len(node.pages), "an edge is empty"
            assert len(node.tokens) == len(node.pages) * self.page_size, "an edge has a part page"
            assert node.parent is not None
            assert node.parent.children[self._key(node.tokens)] is node, "a child has a wrong key"
            assert all(child.locks <= node.locks for child in node.children.values())
            assert node.locks or node.children or node.queued, "an evictable leaf is not queued"
            seen.extend(node.pages.tolist())
            locked += len(node.pages) if node.locks else 0
        assert len(set(seen)) == len(seen), "a page is held twice"
        assert len(seen) == self._num_pages, "the page count is wrong"
        assert locked == self._num_locked_pages, "the locked page count is wrong"

    def _walk(self, tokens: TokenArray, limit: int) -> tuple[_Node, int, list[PageArray]]:
        """Follow ``tokens`` for at most ``limit`` pages.

        Returns the last node reached, the pages of its edge that match, and all pages so far.
        """
        node, taken, done = self._root, 0, 0
        pages: list[PageArray] = []
        while done < limit and taken == len(node.pages):
            start = done * self.page_size
            child = node.children.get(self._key(tokens[start:]))
            if child is None:
                break
            node = child
            taken = self._common_pages(node, tokens[start:], limit - done)
            done += taken
            pages.append(node.pages[:taken])
        return node, taken, pages

    def _common_pages(self, node: _Node, tokens: TokenArray, limit: int) -> int:
        length = min(len(node.pages), limit) * self.page_size
        differs = node.tokens[:length] != tokens[:length]
        first = int(differs.argmax()) if length else 0
        equal = first if length and differs[first] else length
        return equal // self.page_size

    def _touch(self, node: _Node) -> None:
        """Mark the path to ``node`` as used now."""
        self._clock += 1
        while node.parent is not None:
            node.last_used = self._clock
            node = node.parent

    def _split(self, node: _Node, num_pages: int) -> _Node:
        """Cut an edge after ``num_pages``; ``node`` stays the lower part; returns the upper one."""
        assert 0 < num_pages < len(node.pages)
        assert node.parent is not None
        cut = num_pages * self.page_size
        upper = _Node(node.parent, node.tokens[:cut], node.pages[:num_pages])
        upper.locks, upper.last_used = node.locks, node.last_used
        node.parent.children[self._key(upper.tokens)] = upper
        node.parent, node.tokens, node.pages = upper, node.tokens[cut:], node.pages[num_pages:]
        upper.children[self._key(node.tokens)] = node
        return upper

    def _shorten(self, node: _Node, num_pages: int) -> list[int]:
        """Take at most ``num_pages`` off the end of a leaf; an empty leaf leaves the tree."""
        keep = max(len(node.pages) - num_pages, 0)
        evicted: list[int] = node.pages[keep:].tolist()
        if keep:
            node.pages = node.pages[:keep].copy()
            node.tokens = node.tokens[: keep * self.page_size].copy()
            self._queue_if_evictable(node)
            return evicted
        parent = node.parent
        assert parent is not None
        del parent.children[self._key(node.tokens)]
        node.pages = node.pages[:0]
        self._queue_if_evictable(parent)
        return evicted

    def _queue_if_evictable(self, node: _Node) -> None:
        if node.locks == 0 and not node.children and not node.queued:
            node.queued = True
            self._num_queued += 1
            heapq.heappush(self._leaves, (node.last_used, self._num_queued, node))

    def _key(self, tokens: TokenArray) -> bytes:
        return tokens[: self.page_size].tobytes()

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _join(parts: list[PageArray]) -> PageArray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
