"""The prefixes that requests hit most, as requests that compute them, for a member that is new and holds nothing."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.base.sampling import SamplingParams
from weft.engine.request import Request
from weft.memory.keys import Key

# Prefixes that are remembered, and the tokens of one: together they bound the router's memory to about 16 MiB.
MAX_PREFIXES = 256
MAX_TOKENS = 1 << 14
# Prefixes that a new member computes.
MOST_WARMED = 32
# Behind every request of a client.
LAST = 1 << 30


@dataclass(slots=True)
class WantedPrefix:
    tokens: NDArray[np.int32]
    salt: bytes
    hits: int = 0


class WantedPrefixes:
    """Remembers the prefixes that were hit last. Prefixes of one salt are never computed under another."""

    def __init__(self, limit: int = MAX_PREFIXES) -> None:
        self._limit = limit
        self._found: OrderedDict[Key, WantedPrefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def note(self, key: Key, tokens: NDArray[np.int32], salt: bytes) -> None:
        """Count a request that reused these tokens; the key is that of their last cell."""
        if len(tokens) > MAX_TOKENS:
            return
        known = self._found.get(key)
        if known is None:
            # A copy, or the whole prompt would stay in memory.
            known = self._found[key] = WantedPrefix(tokens.copy(), salt)
        known.hits += 1
        self._found.move_to_end(key)
        if len(self._found) > self._limit:
            self._found.popitem(last=False)

    def requests(self, most: int = MOST_WARMED) -> list[Request]:
        """Return requests that compute the prefixes whose hits saved most, the best first."""
        worth = sorted(self._found.values(), key=lambda each: -each.hits * len(each.tokens))
        # One token beyond the prefix: the last token of a prompt is always computed.
        params = SamplingParams(max_tokens=1, temperature=0.0)
        return [
            Request(
                np.append(each.tokens, each.tokens[-1]).astype(np.int32),
                params,
                salt=each.salt,
                priority=LAST,
                snapshots=(len(each.tokens),),
            )
            for each in worth[:most]
        ]
