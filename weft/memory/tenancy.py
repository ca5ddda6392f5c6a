"""Which tenant a cached prefix belongs to, so that everything of a tenant can be dropped.

Cells are found by salted keys, from which no tenant can be read. So the first cell of every path is noted with a digest
of its tenant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from weft.base.tenants import TENANT_BYTES
from weft.memory.keys import Key
from weft.memory.trie import Node, Trie

NO_TENANT = bytes(TENANT_BYTES)
# Noted cells, beyond which those that are neither cached nor under way to a tier are forgotten.
LEAST_NOTED = 1 << 14


class Tenancy:
    """`tries` returns the tries of all tiers, `under_way` the cells that copies and transfers will publish."""

    def __init__(
        self, tries: Callable[[], Iterable[Trie]], under_way: Callable[[], Iterable[Key]] = lambda: ()
    ) -> None:
        self._tries = tries
        self._under_way = under_way
        self._digest_of: dict[Key, bytes] = {}
        self._most = LEAST_NOTED

    def note(self, first: Key, digest: Callable[[], bytes]) -> None:
        """Note the tenant of a path, by its first cell, which is about to be published."""
        if first not in self._digest_of:
            if len(self._digest_of) >= self._most:
                self._forget_uncached()
            self._digest_of[first] = digest()

    def _forget_uncached(self) -> None:
        held = [*(trie.nodes for trie in self._tries()), set(self._under_way())]
        self._digest_of = {key: digest for key, digest in self._digest_of.items() if any(key in each for each in held)}
        self._most = max(LEAST_NOTED, 2 * len(self._digest_of))

    def of(self, node: Node) -> bytes:
        """Return the digest of the tenant that a cell belongs to."""
        while node.parent is not None:
            node = node.parent
        return self._digest_of.get(node.key, NO_TENANT)

    def chooser(self, tenant: bytes | None, prefix: bytes | None) -> Callable[[Node], bool]:
        """Return a function of a cell: whether it belongs to a tenant, or lies at or below a cell whose key has this
        prefix; or any.

        It remembers the cells above, so that it is fast for many cells of a path.
        """
        known: dict[Key, bool] = {}

        def chosen(node: Node) -> bool:
            if tenant is None and prefix is None:
                return True
            way: list[Node] = []
            above: Node | None = node
            while above is not None and above.key not in known:
                way.append(above)
                above = above.parent
            found = above is not None and known[above.key]
            for each in reversed(way):
                own = each.parent is None and tenant is not None and self.of(each) == tenant
                found = found or own or (prefix is not None and each.key.startswith(prefix))
                known[each.key] = found
            return found

        return chosen

    def tokens(self, tries: Iterable[Trie], cell: int) -> dict[bytes, int]:
        """Return the tokens of each tenant in these tries."""
        found: Counter[bytes] = Counter()
        for trie in tries:
            root_of: dict[Key, bytes] = {}
            for node in trie.nodes.values():
                digest = self.of(node) if node.parent is None else root_of[node.parent.key]
                root_of[node.key] = digest
                found[digest] += cell
        return dict(found)
