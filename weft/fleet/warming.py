"""The prefixes that requests hit most, for a member that is new and holds nothing.

What operators drop is forgotten here too, whichever router or replica they dropped it through: members report drops in
their streams of changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.base.sampling import SamplingParams
from weft.base.tenants import Dropped, tenant_digest
from weft.engine.request import Request
from weft.memory.journal import CacheChanges
from weft.memory.keys import Key

# Prefixes that are remembered, and the tokens of one: together they bound the router's memory to about 20 MiB.
MAX_PREFIXES = 256
MAX_TOKENS = 1 << 14
# Prefixes that a new member computes.
MOST_WARMED = 32
# Behind every request of a client.
LAST = 1 << 30
# Streams whose drops are counted.
MAX_EPOCHS = 1024
EVERYTHING = Dropped()


@dataclass(slots=True)
class WantedPrefix:
    """`keys` are those of its cells."""

    keys: tuple[Key, ...]
    tokens: NDArray[np.int32]
    salt: bytes
    hits: int = 0

    def cut_by(self, dropped: Dropped) -> Key | None:
        """Return the key of the cell from which on a drop removes the prefix; None if it does not."""
        if dropped == EVERYTHING or dropped.tenant == tenant_digest(self.salt):
            return self.keys[0]
        if dropped.prefix is None:
            return None
        return next((key for key in self.keys if key.startswith(dropped.prefix)), None)

    def request(self) -> Request:
        """Return a request that computes the prefix."""
        # One token beyond the prefix: the last token of a prompt is always computed.
        return Request(
            np.append(self.tokens, self.tokens[-1]).astype(np.int32),
            SamplingParams(max_tokens=1, temperature=0.0),
            salt=self.salt,
            priority=LAST,
            snapshots=(len(self.tokens),),
        )


class WantedPrefixes:
    """Remembers the prefixes that were hit last. Prefixes of one salt are never computed under another."""

    def __init__(self, limit: int = MAX_PREFIXES) -> None:
        self._limit = limit
        self._found: OrderedDict[Key, WantedPrefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def forget(self, dropped: Dropped) -> None:
        """Forget what an operator dropped."""
        self._found = OrderedDict((key, each) for key, each in self._found.items() if each.cut_by(dropped) is None)

    def note(self, keys: Sequence[Key], tokens: NDArray[np.int32], salt: bytes) -> None:
        """Count a request that reused these tokens, whose cells have these keys."""
        if len(tokens) > MAX_TOKENS:
            return
        known = self._found.get(keys[-1])
        if known is None:
            # A copy, or the whole prompt would stay in memory.
            known = self._found[keys[-1]] = WantedPrefix(tuple(keys), tokens.copy(), salt)
        known.hits += 1
        self._found.move_to_end(keys[-1])
        if len(self._found) > self._limit:
            self._found.popitem(last=False)

    def best(self, most: int = MOST_WARMED) -> list[WantedPrefix]:
        """Return the prefixes whose hits saved most, the best first."""
        return sorted(self._found.values(), key=lambda each: -each.hits * len(each.tokens))[:most]


class DropsHeard:
    """Finds the drops in members' streams that this router has not heard of, even if batches were lost."""

    def __init__(self) -> None:
        # By epoch, because a member that was away continues where it was, and one that was restarted does not.
        self._heard: OrderedDict[int, int] = OrderedDict()

    def new(self, changes: CacheChanges) -> Sequence[Dropped]:
        """Return the drops that are new here; everything, if some were lost and can no longer be named."""
        missing = changes.drops - self._heard.get(changes.epoch, 0)
        if missing <= 0:
            return ()
        self._heard[changes.epoch] = changes.drops
        self._heard.move_to_end(changes.epoch)
        if len(self._heard) > MAX_EPOCHS:
            self._heard.popitem(last=False)
        return changes.dropped[-missing:] if missing <= len(changes.dropped) else (EVERYTHING,)
