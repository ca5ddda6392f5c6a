"""Prefixes that are dropped while routers warm replicas."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np

from tests.support.hashed.rolling import rolling_spec
from weft.base.tenants import Dropped, tenant_digest
from weft.fleet.warming import EVERYTHING, DropsHeard, WantedPrefixes
from weft.memory.journal import CacheChanges, Journal
from weft.memory.keys import PrefixIdentity
from weft.memory.ledger import Ledger

SALTS = (b"1" * 32, b"2" * 32)


@dataclass
class ListeningRouter:
    """A router that hears batches, and beside it what it should still want, found without any event."""

    wanted: WantedPrefixes = field(default_factory=WantedPrefixes)
    heard: DropsHeard = field(default_factory=DropsHeard)
    expected: dict[bytes, int] = field(default_factory=dict)
    connected: bool = True
    lossless: bool = True

    def note(self, path: int, now: int) -> None:
        keys, tokens, salt = prefix(path)
        self.wanted.note(keys, tokens, salt)
        self.expected[keys[-1]] = now

    def hear(self, batch: CacheChanges) -> None:
        for dropped in self.heard.new(batch):
            self.wanted.forget(dropped)

    def check(self, drops: list[tuple[int, Dropped]]) -> None:
        """Fail if a prefix is wanted that was dropped after its last hit, or, without losses, if another is missing."""
        left = {each.keys[-1] for each in self.wanted.best(99)}
        alive = {key for key, hit in self.expected.items() if not any(hit < at and cuts(d, key) for at, d in drops)}
        assert left <= alive
        assert not self.lossless or left == alive


def prefix(path: int) -> tuple[list[bytes], np.ndarray, bytes]:
    """One of eight prefixes of two tenants; the second half of them continue the first half."""
    salt, tokens = SALTS[path % 2], np.arange(64 * (1 + path // 4), dtype=np.int32) + path % 4
    return PrefixIdentity(64, salt).keys(tokens), tokens, salt


def cuts(dropped: Dropped, last: bytes) -> bool:
    keys, _, salt = next(found for path in range(8) if (found := prefix(path))[0][-1] == last)
    named = dropped.prefix is not None and any(key[: len(dropped.prefix)] == dropped.prefix for key in keys)
    return dropped == EVERYTHING or dropped.tenant == tenant_digest(salt) or named


def random_drop(choose: Random) -> Dropped:
    if choose.random() < 0.2:
        return EVERYTHING
    keys, _, salt = prefix(choose.randrange(8))
    return Dropped(tenant_digest(salt)) if choose.random() < 0.4 else Dropped(None, choose.choice(keys)[:8])


def live(seed: int, loss: float) -> None:
    """Let routers want, hear, miss and reconnect at random, while prefixes are dropped at random."""
    choose = Random(seed)
    journal = Journal(Ledger(rolling_spec(), 1 << 14, seats=1, max_length=64), epoch=seed)
    routers = [ListeningRouter() for _ in range(3)]
    drops: list[tuple[int, Dropped]] = []
    journal.restart()
    for now in range(60):
        roll, router = choose.random(), choose.choice(routers)
        if roll < 0.5:
            router.note(choose.randrange(8), now)
        elif roll < 0.65:
            drops.append((now, random_drop(choose)))
            journal.note_drop(drops[-1][1].tenant, drops[-1][1].prefix)
        elif roll < 0.75 and loss:
            router.connected = not router.connected
            if router.connected:
                journal.restart()
        if (batch := journal.take()) is not None:
            for each in routers:
                each.lossless &= each.connected
                if each.connected and choose.random() < loss:
                    each.lossless = False
                elif each.connected:
                    each.hear(batch)
                    each.check(drops)
    journal.restart()
    last = journal.take()
    assert last is not None
    for each in routers:
        each.hear(last)
        each.check(drops)
