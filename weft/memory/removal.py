"""Takes what an operator drops out of the tries of all tiers, a bounded part between two steps.

A trie may have a million cells, and to look at all of them takes seconds. So the drop is accepted at once, and from
then on hides what it names: requests of a dropped prefix reuse nothing and keep nothing (`covers`), until its cells are
gone. Tiers are walked from the device down, because saves move cells down, never up, while requests do not load them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.base.tenants import Dropped
from weft.memory.cache import Cache
from weft.memory.keys import Key
from weft.memory.trie import Node

# To drop a cell takes about as long as to look at this many.
LOOKS_PER_DROP = 10


class CacheRemoval:
    """Walks over the cells of one cache, children before their parents, and drops those that are `chosen`.

    A choice includes all cells below a chosen one. `left` are those in use.
    """

    def __init__(self, cache: Cache, chosen: Callable[[Node], bool]) -> None:
        self.dropped = self.left = 0
        self._cache = cache
        self._chosen = chosen
        self._walk = cache.trie.walk()
        # Cells above dropped ones that are not chosen themselves.
        self._above: dict[Key, None] = {}

    def advance(self, looks: int) -> int:
        """Go on, for as long as looking at this many cells takes; return how many looks are left, 0 if it is not done.

        >>> from weft.memory.trie import Trie
        >>> trie = Trie()
        >>> for number in range(3):
        ...     _ = trie.insert(bytes([number]), None, None, 0)
        >>> class NothingUsed:
        ...     def __init__(self): self.trie = trie
        ...     def drop_cell(self, node): trie.cut(node); return True
        >>> removal = CacheRemoval(NothingUsed(), lambda node: node.key != b"\\x01")
        >>> removal.advance(1), len(trie), removal.advance(100) > 0, list(trie.nodes)
        (0, 2, True, [b'\\x01'])
        """
        while looks > 0 and (node := self._walk.next()) is not None:
            looks -= 1
            if self._chosen(node):
                looks -= LOOKS_PER_DROP
                self._drop(node)
        while looks > 0 and self._above:
            looks -= LOOKS_PER_DROP
            self._drop_way(self._above.popitem()[0])
        return max(0, looks)

    def _drop(self, node: Node) -> None:
        above = node.parent
        if not self._cache.drop_cell(node):
            self.left += 1
            return
        self.dropped += 1
        if above is not None and not self._chosen(above):
            self._above[above.key] = None

    def _drop_way(self, key: Key) -> None:
        """Drop cells without a point above a dropped one: they served only as the way to it."""
        above = self._cache.trie.nodes.get(key)
        while above is not None and above.resume is None and not above.hits:
            parent = above.parent
            if not self._cache.drop_cell(above):
                return
            self.dropped += 1
            above = parent

    def end(self) -> None:
        self._walk.end()


class Hidden:
    """The drops whose cells are not gone yet."""

    def __init__(self) -> None:
        self._drops: list[Dropped] = []

    def __bool__(self) -> bool:
        return bool(self._drops)

    def add(self, dropped: Dropped) -> None:
        self._drops.append(dropped)

    def remove(self, dropped: Dropped) -> None:
        self._drops.remove(dropped)

    def covers(self, keys: Sequence[Key], tenant: Callable[[], bytes]) -> bool:
        """Return whether a drop names a prefix of the prompt with these keys, of the tenant with this digest."""
        return any(self._covers(each, keys, tenant) for each in self._drops)

    def _covers(self, dropped: Dropped, keys: Sequence[Key], tenant: Callable[[], bytes]) -> bool:
        if dropped.tenant is None and dropped.prefix is None:
            return True
        if dropped.tenant is not None and dropped.tenant == tenant():
            return True
        return dropped.prefix is not None and any(key.startswith(dropped.prefix) for key in keys)
