"""Drops in tests: one from its beginning to its answer, and drops at random moments."""

from __future__ import annotations

from random import Random
from typing import Any

from weft.engine.events import Output
from weft.engine.loop import Engine
from weft.memory.lease import Lease
from weft.memory.trie import Node, path


def drop(engine: Engine, tenant: bytes | None = None, prefix: bytes | None = None) -> dict[str, Any]:
    """Return the answer of a drop, for which an engine may have to step."""
    engine.begin_drop(0, tenant, prefix)
    while not (answers := engine.take_dropped()):
        engine.step()
    return answers[0]


class DroppingEngine(Engine):
    """Drops everything or a prefix, now and then, between any two steps.

    A request that starts after a drop was accepted must not use a cell of before. Cells that sequences of before use
    are left, so these are no cause for complaint.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.random = Random("drops")
        self.begun, self.answers = 0, dict[int, dict[str, Any]]()
        # By number of a drop: the cells that it named, and the leases of before.
        self.named: dict[int, tuple[set[Node], list[Lease]]] = {}

    def step(self) -> list[Output]:
        if self.random.random() < 0.1:
            self._begin()
        outputs = super().step()
        for named, before in self.named.values():
            for lease in before:
                named.difference_update(path(lease.node))
            for lease in self.ledger.leases.values():
                if not any(lease is each for each in before):
                    assert not named.intersection(path(lease.node)), "a request reuses what was dropped"
        found = self.take_dropped()
        for number in found:
            del self.named[number]
        self.answers |= found
        return outputs

    def _begin(self) -> None:
        keys = [key for cache in self.ledger.caches for key in cache.trie.nodes]
        prefix = self.random.choice(keys) if keys and self.random.random() < 0.6 else None
        cells = filter(self.ledger.tenancy.chooser(None, prefix), self.ledger.cache.trie.nodes.values())
        self.named[self.begun] = set(cells), list(self.ledger.leases.values())
        self.begin_drop(self.begun, None, prefix)
        self.begun += 1
