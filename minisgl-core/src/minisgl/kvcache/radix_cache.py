"""A radix tree over pages of tokens (after SGLang's RadixAttention, Zheng et al., 2024).

Every edge is a non-empty whole number of pages. A node stands for the path from the root to it:
a split keeps the old node object as the lower part, so a handle taken before it still yields the
same pages. There is one tree a salt, so different salts share nothing.

What keeps it cheap:

* Tokens and pages are ``bytes``: a page is found by a slice in a dict, an edge is compared with
  one ``memcmp``.
* No edge crosses a multiple of ``block_pages`` pages, and a node that ends at one can be reached
  from the one a block before it in one look-up, so that of a path of very many short edges at most
  one block is walked.
* Locks and times of use are kept at the node that a handle ends at. A node is *held* if it or a
  child is; only nodes that become held, or cease to be, are visited. A time of use counts for the
  whole path: a leaf that goes leaves its time to its parent.
* Leaves that may be evictable are in a heap, each node at most once. An entry may be out of date;
  it is then dropped or renewed when it comes to the top, and each use of a node makes at most
  one entry out of date.
"""

import heapq
from collections.abc import Iterator

import numpy as np

from minisgl.kvcache.interface import CacheHandle, Match, PageArray, PrefixCache, TokenArray
from minisgl.kvcache.radix_node import Block, Handle, Node, Root

_WIDTH = 4
"""Bytes of a token id and of a page id."""


class RadixPrefixCache(PrefixCache):
    """Shares pages between requests with equal prefixes; evicts the least recently used.

    Args:
        page_size: tokens a page.
        block_pages: pages that one look-up can skip; changes cost, and nothing else.
    """

    def __init__(self, page_size: int, *, block_pages: int = 256) -> None:
        self.page_size = page_size
        self._block = block_pages
        self._page_bytes = page_size * _WIDTH
        self._roots: dict[str | None, Root] = {}
        self._clock = 0
        self._num_pages = 0
        self._num_held_pages = 0
        self._leaves: list[tuple[int, int, Node]] = []
        self._num_queued = 0

    @property
    def num_evictable_pages(self) -> int:
        """Pages outside every locked path: whole unlocked subtrees can go, leaf by leaf."""
        return self._num_pages - self._num_held_pages

    @property
    def num_pages(self) -> int:
        """Pages in all trees."""
        return self._num_pages

    @property
    def num_salts(self) -> int:
        """Trees that hold anything, the one without a salt included."""
        return len(self._roots)

    def match(self, tokens: TokenArray, salt: str | None = None) -> Match:
        """Return the longest cached prefix in whole pages, at most ``len(tokens) - 1`` tokens."""
        limit = max(len(tokens) - 1, 0) // self.page_size
        root = self._roots.get(salt)
        if root is None or not limit:
            return Match(handle=Handle(None, 0), pages=_to_pages(b""))
        node, depth, found = self._walk(root, self._to_bytes(tokens, limit), limit)
        return Match(handle=Handle(node, depth), pages=_to_pages(b"".join(found)))

    def insert(self, tokens: TokenArray, pages: PageArray, salt: str | None = None) -> Match:
        """Add a sequence of whole pages; returns its canonical pages and handle."""
        num_pages = len(pages)
        assert len(tokens) == num_pages * self.page_size, "only whole pages are cached"
        if not num_pages:
            return Match(handle=Handle(None, 0), pages=_to_pages(b""))
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Root(salt)
        data = self._to_bytes(tokens, num_pages)
        node, depth, found = self._walk(root, data, num_pages)
        canonical = b"".join(found)
        if depth < node.end:
            node = self._split(node, depth)
        if depth < num_pages:
            canonical += pages[depth:].astype(np.int32, copy=False).tobytes()
            node = self._grow(node, data, canonical)
            self._num_pages += num_pages - depth
        self._touch(node)
        self._queue_if_evictable(node)
        return Match(handle=Handle(node, num_pages), pages=_to_pages(canonical))

    def lock(self, handle: CacheHandle) -> None:
        """Keep the handle's path; a handle that ends inside an edge splits it here."""
        if not handle.num_pages:
            return
        node = handle.node = self._end_of(handle)
        self._touch(node)
        node.locks += 1
        if node.locks + node.held_children > 1:
            return
        while node.parent is not None:
            self._num_held_pages += node.end - node.start
            node = node.parent
            node.held_children += 1
            if node.locks + node.held_children > 1:
                break

    def unlock(self, handle: CacheHandle) -> None:
        """Undo one lock of the handle's path."""
        if not handle.num_pages:
            return
        node: Node = handle.node
        assert node.locks > 0, "a handle is unlocked no more often than it was locked"
        node.locks -= 1
        while not node.locks + node.held_children and node.parent is not None:
            self._num_held_pages -= node.end - node.start
            self._queue_if_evictable(node)
            node = node.parent
            node.held_children -= 1

    def evict(self, num_pages: int) -> PageArray:
        """Forget pages of unlocked leaves, least recently used first, each from its end."""
        evicted: list[bytes] = []
        left = num_pages
        while left > 0 and self._leaves:
            time, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if node.locks or node.children:
                continue
            if node.last_used != time:
                self._queue_if_evictable(node)
                continue
            evicted.append(self._shorten(node, left))
            left -= len(evicted[-1]) // _WIDTH
        self._num_pages -= num_pages - left
        return _to_pages(b"".join(evicted))

    def pages_of(self, handle: CacheHandle) -> PageArray:
        """Return the pages of a locked handle, int32 ``[n]``."""
        parts: list[bytes] = []
        node: Node | None = handle.node
        while node is not None:
            if node.start < handle.num_pages:
                parts.append(node.pages[: (handle.num_pages - node.start) * _WIDTH])
            node = node.parent
        return _to_pages(b"".join(reversed(parts)))

    def check(self) -> None:
        """Recount pages, locks and edges; raises ``AssertionError`` on any difference."""
        seen: list[int] = []
        num_nodes = num_held = num_queued = 0
        for node in self._nodes():
            self._check_node(node)
            num_nodes += 1
            num_queued += node.queued
            num_held += node.end - node.start if node.locks + node.held_children else 0
            seen.extend(_to_pages(node.pages).tolist())
        assert all(root.children for root in self._roots.values()), "an empty tree is kept"
        assert len(set(seen)) == len(seen), "a page is held twice"
        assert len(seen) == self._num_pages, "the page count is wrong"
        assert num_held == self._num_held_pages, "the locked page count is wrong"
        assert len(self._leaves) == num_queued <= num_nodes, "the heap has entries of gone nodes"

    def _check_node(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert node.start == parent.end < node.end, "an edge is empty or in the wrong place"
        assert node.start // self._block == (node.end - 1) // self._block, (
            "an edge crosses a block's end"
        )
        assert len(node.tokens) == (node.end - node.start) * self._page_bytes, "a part page"
        assert len(node.pages) == (node.end - node.start) * _WIDTH, "a page without its tokens"
        assert parent.children[node.tokens[: self._page_bytes]] is node, "a child has a wrong key"
        held = sum(bool(child.locks + child.held_children) for child in node.children.values())
        assert node.held_children == held, "the count of held children is wrong"
        assert node.locks or node.children or node.queued, "an evictable leaf is not queued"
        block = node.block
        assert (block is not None) == (node.end % self._block == 0), "a block's end is not known"
        if block is not None:
            assert block.home.end == node.end - self._block, "a block of another length"
            assert block.home.blocks[block.tokens] is node, "a block has a wrong key"
        for home in (node, parent):
            leads = [
                end.block is not None and end.block.home is home for end in home.blocks.values()
            ]
            assert all(leads), "a look-up leads to a node that is gone"

    def _walk(self, root: Node, data: bytes, limit: int) -> tuple[Node, int, list[bytes]]:
        """Follow ``data``, the tokens of ``limit`` pages, from ``root``.

        Returns the last node reached, the matching pages up to there (its ``end``, or fewer if
        its edge matches in part), and their ids in parts.
        """
        page_bytes, block = self._page_bytes, self._block
        node, depth, at = root, 0, 0
        found: list[bytes] = []
        while depth < limit:
            if node.blocks and limit - depth >= block:
                further = node.blocks.get(data[at : at + block * page_bytes])
                if further is not None:
                    assert further.block is not None
                    node = further
                    found.append(further.block.pages)
                    depth += block
                    at += block * page_bytes
                    continue
            child = node.children.get(data[at : at + page_bytes])
            if child is None:
                break
            if child.end > depth + 1 and not data.startswith(child.tokens, at):
                common = self._common_pages(child.tokens, data[at : at + len(child.tokens)])
                found.append(child.pages[: common * _WIDTH])
                return child, depth + common, found
            node, depth = child, child.end
            found.append(child.pages)
            at += len(child.tokens)
        return node, depth, found

    def _common_pages(self, one: bytes, other: bytes) -> int:
        """Return how many leading pages are equal; ``other`` may be the shorter one."""
        left = np.frombuffer(one, dtype=np.int32, count=len(other) // _WIDTH)
        differs = left != np.frombuffer(other, dtype=np.int32)
        equal = int(differs.argmax()) if differs.any() else len(left)
        return equal // self.page_size

    def _grow(self, node: Node, data: bytes, canonical: bytes) -> Node:
        """Append what ``data`` has beyond ``node``, cut at the ends of blocks; returns the leaf.

        Args:
            node: where the path of ``data`` ends so far.
            data: the tokens of the whole path.
            canonical: its page ids.
        """
        page_bytes, block, end = self._page_bytes, self._block, len(canonical) // _WIDTH
        while node.end < end:
            start = node.end
            stop = min(end, (start // block + 1) * block)
            tokens = data[start * page_bytes : stop * page_bytes]
            pages = canonical[start * _WIDTH : stop * _WIDTH]
            child = Node(node, tokens, pages, start, stop)
            node.children[tokens[:page_bytes]] = child
            if stop % block == 0:
                first = stop - block
                while node.end > first:
                    assert node.parent is not None
                    node = node.parent
                if start > first:
                    tokens = data[first * page_bytes : stop * page_bytes]
                    pages = canonical[first * _WIDTH : stop * _WIDTH]
                child.block = Block(node, tokens, pages)
                node.blocks[tokens] = child
            node = child
        return node

    def _end_of(self, handle: Handle) -> Node:
        """Return the node at which a handle's path ends, after a split if need be."""
        node = handle.node
        assert node is not None
        assert handle.num_pages <= node.end, "a handle is locked before anything is evicted"
        # Splits since the handle was made may have moved its end to a node further up.
        while node.start >= handle.num_pages:
            assert node.parent is not None
            node = node.parent
        return self._split(node, handle.num_pages) if handle.num_pages < node.end else node

    def _touch(self, node: Node) -> None:
        """Mark the path to ``node`` as used now."""
        self._clock += 1
        node.last_used = self._clock

    def _split(self, node: Node, depth: int) -> Node:
        """Cut an edge at ``depth`` pages; ``node`` stays the lower part; returns the upper one."""
        parent = node.parent
        assert parent is not None
        assert node.start < depth < node.end
        cut, page_cut = (depth - node.start) * self._page_bytes, (depth - node.start) * _WIDTH
        upper = Node(parent, node.tokens[:cut], node.pages[:page_cut], node.start, depth)
        upper.last_used = node.last_used
        upper.held_children = int(bool(node.locks + node.held_children))
        parent.children[upper.tokens[: self._page_bytes]] = upper
        node.parent, node.start = upper, depth
        node.tokens, node.pages = node.tokens[cut:], node.pages[page_cut:]
        upper.children[node.tokens[: self._page_bytes]] = node
        return upper

    def _shorten(self, node: Node, num_pages: int) -> bytes:
        """Take at most ``num_pages`` off the end of a leaf; an empty leaf leaves the tree.

        Returns the ids of those pages.
        """
        if node.block is not None:
            del node.block.home.blocks[node.block.tokens]
            node.block = None
        keep = max(node.end - node.start - num_pages, 0)
        evicted = node.pages[keep * _WIDTH :]
        if keep:
            node.end = node.start + keep
            node.pages = node.pages[: keep * _WIDTH]
            node.tokens = node.tokens[: keep * self._page_bytes]
            self._queue_if_evictable(node)
        else:
            self._remove(node)
        return evicted

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens[: self._page_bytes]]
        node.end = 0
        # Whoever used the leaf used its parent too.
        parent.last_used = max(parent.last_used, node.last_used)
        if not isinstance(parent, Root):
            self._queue_if_evictable(parent)
        elif not parent.children:
            del self._roots[parent.salt]

    def _queue_if_evictable(self, node: Node) -> None:
        if not (node.locks or node.children or node.queued):
            node.queued = True
            self._num_queued += 1
            heapq.heappush(self._leaves, (node.last_used, self._num_queued, node))

    def _to_bytes(self, tokens: TokenArray, num_pages: int) -> bytes:
        return tokens[: num_pages * self.page_size].astype(np.int32, copy=False).tobytes()

    def _nodes(self) -> Iterator[Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _to_pages(data: bytes) -> PageArray:
    return np.frombuffer(data, dtype=np.int32)
