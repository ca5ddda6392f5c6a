"""The trie of cells: what is cached, and where a sequence may resume.

A node is one cell under a chained key, with its page. Because keys are chained, one dictionary holds the whole trie,
and because only leaves are cut, a node has all its ancestors: bisection finds the deepest match.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Sequence_

from weft.memory.captures import Origin
from weft.memory.keys import Key


class Node:
    """A cached cell. `depth` counts cells from the root, itself included; `pins` counts leases whose path ends here.

    `holders` counts those leases and the children with holders: a cell without any can be evicted sooner or later.
    `older` and `newer` are its neighbours in the order of insertion.
    """

    __slots__ = (
        "children",
        "depth",
        "hits",
        "holders",
        "key",
        "newer",
        "older",
        "page",
        "parent",
        "pins",
        "resume",
        "stamp",
        "used",
    )

    def __init__(self, key: Key, parent: Node | None, page: int | None, used: int) -> None:
        self.key = key
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent else 1
        self.page = page
        self.children = 0
        self.pins = 0
        self.holders = 0
        self.resume: ResumePoint | None = None
        self.used = used
        self.hits = 0
        self.stamp = 0
        self.older: Node | None = None
        self.newer: Node | None = None


class ResumePoint:
    """Makes a node a position to start from: its checkpoint and the window pages behind it, kept as a unit.

    `window` has the pages of the last cells up to and including the node's own, as many as the window can see. `passes`
    counts starts further down its path since it was last hit itself. `kind` is its class for statistics; `heir_of` is
    the class and last use of the most wanted evicted point below it. `due` is the lookup at which its age changes its
    value. A `retained` one is not evicted.
    """

    __slots__ = (
        "due",
        "explained",
        "heir_of",
        "hits",
        "kind",
        "node",
        "origin",
        "passes",
        "retained",
        "slot",
        "stamp",
        "used",
        "window",
    )

    def __init__(self, node: Node, slot: int | None, window: tuple[int, ...], used: int) -> None:
        self.node = node
        self.slot = slot
        self.window = window
        self.origin = Origin.CANDIDATE
        self.kind = 0
        self.explained = False
        self.used = used
        self.heir_of: tuple[int, int] | None = None
        self.hits = 0
        self.passes = 0
        self.stamp = 0
        self.due = 0
        self.retained = False


class Walk:
    """Visits the cells of a trie from the newest to the oldest, so children before parents, while cells come and go.

    Cells that are inserted after its start are not visited.
    """

    __slots__ = ("_trie", "ahead")

    def __init__(self, trie: Trie) -> None:
        self._trie = trie
        self.ahead = trie.newest
        trie.walks.append(self)

    def next(self) -> Node | None:
        node = self.ahead
        if node is not None:
            self.ahead = node.older
        return node

    def end(self) -> None:
        """Visit no more. A walk that has visited all cells must be ended too."""
        self.ahead = None
        self._trie.walks.remove(self)


class Trie:
    def __init__(self) -> None:
        self.nodes: dict[Key, Node] = {}
        self.held = 0  # cells with holders
        # Whether every key was computed here from its tokens, so that it has one place. Keys of other engines may lie.
        self.trusted = True
        self.newest: Node | None = None
        self.walks: list[Walk] = []

    def __len__(self) -> int:
        return len(self.nodes)

    def deepest(self, keys: Sequence_[Key]) -> Node | None:
        """Return the node of the longest cached prefix of `keys`."""
        if not self.trusted:
            return self._walk(keys)
        # Present keys come first: bisect for the first absent one.
        depth = bisect_left(range(len(keys)), True, key=lambda i: keys[i] not in self.nodes)
        return self.nodes[keys[depth - 1]] if depth else None

    def _walk(self, keys: Sequence_[Key]) -> Node | None:
        above: Node | None = None
        for key in keys:
            node = self.nodes.get(key)
            if node is None or node.parent is not above:
                break
            above = node
        return above

    def contradicts(self, keys: Sequence_[Key]) -> bool:
        """Return whether a cell of this path is held under another one."""
        above: Key | None = None
        for key in keys:
            node = self.nodes.get(key)
            if node is not None and (None if node.parent is None else node.parent.key) != above:
                return True
            above = key
        return False

    def insert(self, key: Key, parent: Node | None, page: int | None, used: int) -> Node:
        assert key not in self.nodes
        node = Node(key, parent, page, used)
        self.nodes[key] = node
        node.older = self.newest
        if self.newest is not None:
            self.newest.newer = node
        self.newest = node
        if parent:
            parent.children += 1
        return node

    def walk(self) -> Walk:
        return Walk(self)

    def pin(self, node: Node) -> None:
        """Protect a node and the path above it."""
        node.pins += 1
        above: Node | None = node
        while above:
            above.holders += 1
            if above.holders > 1:
                return
            self.held += 1
            above = above.parent

    def unpin(self, node: Node) -> None:
        node.pins -= 1
        above: Node | None = node
        while above:
            above.holders -= 1
            if above.holders:
                return
            self.held -= 1
            above = above.parent

    def cut(self, node: Node) -> None:
        """Remove a leaf."""
        assert not node.children
        assert not node.pins
        assert node.resume is None
        del self.nodes[node.key]
        self._unlink(node)
        if node.parent:
            node.parent.children -= 1

    def _unlink(self, node: Node) -> None:
        for walk in self.walks:
            if walk.ahead is node:
                walk.ahead = node.older
        if node.newer is not None:
            node.newer.older = node.older
        else:
            self.newest = node.older
        if node.older is not None:
            node.older.newer = node.newer
        # Or a chain of evicted cells would stay in memory.
        node.older = node.newer = None


def path(node: Node | None) -> list[Node]:
    """Return the nodes from the root to `node`, in order."""
    nodes: list[Node] = []
    while node:
        nodes.append(node)
        node = node.parent
    nodes.reverse()
    return nodes


def cells_without_holders(node: Node | None) -> int:
    """Return how many cells of the path to `node` a pin there would newly protect."""
    count = 0
    while node and not node.holders:
        count += 1
        node = node.parent
    return count


def resume_at_or_above(node: Node | None) -> ResumePoint | None:
    while node:
        if node.resume:
            return node.resume
        node = node.parent
    return None
