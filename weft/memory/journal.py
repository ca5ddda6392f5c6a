"""What a cache holds, as a stream of changes: which resume points and cells appeared and disappeared, in which tier.

Routers subscribe to it. A change has a salted key and a position, never tokens. Without a subscriber nothing is
recorded. A stream starts with everything that is held, and starts over when a subscriber is new or has lost a part.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Annotated

from msgspec import Meta

from weft.base.tenants import Dropped
from weft.memory.cache import Cache
from weft.memory.keys import KEY_BYTES, Key
from weft.memory.ledger import Ledger
from weft.memory.trie import Walk

# Changes that wait to be taken; with more, the stream starts over.
MOST_WAITING = 1 << 16
# Changes in one batch. Listing this many takes about a millisecond.
MOST_IN_BATCH = 1 << 12
# Drops that a stream repeats when it starts over.
MOST_DROPS = 16

# Bounds where a batch arrives.
_Number = Annotated[int, Meta(ge=0, le=1 << 62)]
_Position = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Key = Annotated[Key, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Codes = Annotated[bytes, Meta(max_length=MOST_IN_BATCH)]


class Tier(IntEnum):
    """Where a resume point lies. The value is its code in a batch.

    PAGE stands for a cell on the device without its state. A sequence cannot start there, but need not store the cell
    again. Models without states and windows have none: a sequence can start at the end of every cell.
    """

    DEVICE = 0
    HOST = 1
    DISK = 2
    PAGE = 3


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Consecutive changes as columns. The first one has the number `first`; numbers have no gaps within an `epoch`.

    `fresh`: forget all earlier changes; this batch and those after it list everything that is held. `tokens` are the
    positions of the resume points, `tiers` their tiers, and `held` is 1 for a point that appeared and 0 for one that
    was dropped. A point that moves to another tier appears there and is dropped here.

    `drops` counts what operators have dropped since the engine started; `dropped` are the last of these, as many as
    the reader of a stream without losses has not seen. A reader that misses more must assume that all was dropped.
    """

    epoch: _Number
    first: _Number
    fresh: bool
    keys: Annotated[tuple[_Key, ...], Meta(max_length=MOST_IN_BATCH)]
    tokens: Annotated[tuple[_Position, ...], Meta(max_length=MOST_IN_BATCH)]
    tiers: _Codes
    held: _Codes
    drops: _Number = 0
    dropped: Annotated[tuple[Dropped, ...], Meta(max_length=MOST_DROPS)] = ()

    def __post_init__(self) -> None:
        if not len(self.keys) == len(self.tokens) == len(self.tiers) == len(self.held):
            raise ValueError("the columns of a batch must have the same length")
        if self.tiers and max(self.tiers) > max(Tier):
            raise ValueError(f"a tier must be at most {max(Tier)}, got {max(self.tiers)}")
        if len(self.dropped) > self.drops:
            raise ValueError(f"a batch with {len(self.dropped)} drops must count them, got {self.drops}")

    @property
    def next(self) -> int:
        """Number of the change after this batch."""
        return self.first + len(self.keys)


class Journal:
    """Records the changes of a ledger's cache and of the tier below it, for one stream with any number of readers."""

    def __init__(self, ledger: Ledger, epoch: int | None = None, most: int = MOST_WAITING) -> None:
        self.epoch = secrets.randbits(62) if epoch is None else epoch
        self.ledger = ledger
        self._most = most
        self._number = 0
        self._fresh = False
        self._keys: list[Key] = []
        self._tokens: list[int] = []
        self._tiers, self._held = bytearray(), bytearray()
        # Caches with cells that were held when the stream started and are still to be listed.
        self._unlisted: list[tuple[Tier, Cache, Walk]] = []
        # The last drops, and how many of them the stream has not sent.
        self._drops = self._unsent_drops = 0
        self._dropped: deque[Dropped] = deque(maxlen=MOST_DROPS)

    @property
    def waiting(self) -> bool:
        """Whether `take` has something to return."""
        return self._fresh or bool(self._keys) or bool(self._unlisted) or bool(self._unsent_drops)

    def restart(self) -> None:
        """Start the stream, or start it over for a reader that is new or has lost a part."""
        self._clear()
        self._fresh = True
        self._unsent_drops = len(self._dropped)
        for tier, cache in self._caches():
            cache.watch = partial(self.note, tier)
            self._unlisted.append((tier, cache, cache.trie.walk()))

    def stop(self) -> None:
        """Record nothing more: the last reader has left."""
        self._clear()
        self._fresh = False
        self._unsent_drops = 0
        for _, cache in self._caches():
            cache.watch = None

    def take(self, most: int = MOST_IN_BATCH) -> CacheChanges | None:
        """Return up to `most` changes, or None if there are none. Call it between steps.

        Listing what is held looks at up to `most` cells, so that a large cache does not delay a step.
        """
        if not self.waiting:
            return None
        # What happened comes before what is held now: a point that was dropped meanwhile is no longer listed.
        looks = most
        while self._unlisted and looks and len(self._keys) < most:
            looks -= self._list_some(min(looks, most - len(self._keys)))
        columns = tuple(self._keys[:most]), tuple(self._tokens[:most]), self._tiers[:most], self._held[:most]
        for column in (self._keys, self._tokens, self._tiers, self._held):
            del column[:most]
        keys, tokens, tiers, held = columns
        # A drop does not wait for its turn behind the changes: routers must not compute anew what it named.
        dropped = tuple(self._dropped)[len(self._dropped) - self._unsent_drops :]
        batch = CacheChanges(
            self.epoch, self._number, self._fresh, keys, tokens, bytes(tiers), bytes(held), self._drops, dropped
        )
        self._number, self._fresh, self._unsent_drops = batch.next, False, 0
        return batch

    def _caches(self) -> list[tuple[Tier, Cache]]:
        tiers = self.ledger.tiers
        lower = () if tiers is None else tiers.chain
        # What engines share is no reason to prefer one of them. Arrivals are in transit, to requests that a router has
        # placed already.
        own = [link for link in lower if link.discovery is None]
        return [(Tier.DEVICE, self.ledger.cache), *((Tier[link.name.upper()], link.lower) for link in own)]

    def _clear(self) -> None:
        for column in (self._keys, self._tokens, self._tiers, self._held):
            column.clear()
        while self._unlisted:
            self._unlisted.pop()[2].end()

    def note(self, tier: Tier, key: Key, tokens: int, held: bool, point: bool) -> None:
        """Record a change of a cell, or of the resume point at its end."""
        if len(self._keys) >= self._most:
            self.restart()
        elif point or tier is Tier.DEVICE:
            self._add(tier if point else Tier.PAGE, key, tokens, held)

    def note_drop(self, tenant: bytes | None, prefix: bytes | None) -> None:
        """Record what an operator dropped. It counts without a reader too: one that was away must learn of it."""
        self._drops += 1
        self._dropped.append(Dropped(tenant, prefix))
        if self.ledger.cache.watch is not None:
            self._unsent_drops = min(self._unsent_drops + 1, MOST_DROPS)

    def _add(self, tier: Tier, key: Key, tokens: int, held: bool) -> None:
        self._keys.append(key)
        self._tokens.append(tokens)
        self._tiers.append(tier)
        self._held.append(held)

    def _list_some(self, most: int) -> int:
        """List the points of up to `most` cells that were held when the stream started; return how many cells."""
        tier, cache, walk = self._unlisted[-1]
        cell, looks = cache.cell, 0
        while looks < most and (node := walk.next()) is not None:
            looks += 1
            if cache.point_bytes and tier is Tier.DEVICE:
                self._add(Tier.PAGE, node.key, node.depth * cell, held=True)
            if node.resume is not None or not cache.point_bytes:
                self._add(tier, node.key, node.depth * cell, held=True)
        if walk.ahead is None:
            walk.end()
            self._unlisted.pop()
        return looks
