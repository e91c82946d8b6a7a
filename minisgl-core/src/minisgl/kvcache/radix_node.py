"""What the radix tree is made of: nodes, the look-ups that skip a block of them, and handles."""


class Node:
    """One edge of a tree, from ``start`` to ``end`` pages, and the subtree below it."""

    __slots__ = (
        "block",
        "blocks",
        "children",
        "end",
        "held_children",
        "last_used",
        "locks",
        "pages",
        "parent",
        "queued",
        "start",
        "tokens",
    )

    def __init__(
        self, parent: "Node | None", tokens: bytes, pages: bytes, start: int, end: int
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.start = start
        self.end = end
        self.children: dict[bytes, Node] = {}
        self.blocks: dict[bytes, Node] = {}
        """Nodes that end one block further, by the tokens between."""
        self.block: Block | None = None
        self.locks = 0
        self.held_children = 0
        self.last_used = 0
        self.queued = False


class Root(Node):
    """The empty prefix of one salt; kept while anything lies below it."""

    __slots__ = ("salt",)

    def __init__(self, salt: str | None) -> None:
        super().__init__(None, b"", b"", 0, 0)
        self.salt = salt


class Block:
    """The look-up that leads to a node at the end of a block: it is ``home.blocks[tokens]``."""

    __slots__ = ("home", "pages", "tokens")

    def __init__(self, home: Node, tokens: bytes, pages: bytes) -> None:
        self.home = home
        self.tokens = tokens
        self.pages = pages


class Handle:
    """The first ``num_pages`` pages of the path to ``node``; ``None`` for the empty prefix."""

    __slots__ = ("node", "num_pages")

    def __init__(self, node: Node | None, num_pages: int) -> None:
        self.node = node
        self.num_pages = num_pages
