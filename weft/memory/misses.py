"""Why a prefix was not reused further: every lookup gets a reason, in tokens and in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from weft.memory.keys import Key
from weft.memory.recent_keys import RecentKeys, short

# Cells, states and first cells that are remembered after they are gone, each in about 100 bytes.
GHOSTS = 1 << 16
# Bits of the class of a lost state, as one number more than it is; 0: it has none.
_KIND_BITS = 15


class Reason(StrEnum):
    NOTHING_MORE = "nothing_more"
    BELOW_GRID = "below_grid"
    CACHE_OFF = "cache_off"
    NEVER_COMPUTED = "never_computed"
    OTHER_SALT = "other_salt"
    EVICTED = "evicted"
    STATE_NEVER_KEPT = "state_never_kept"
    STATE_SKIPPED = "state_skipped"
    STATE_EVICTED = "state_evicted"
    SCORES_WANTED = "scores_wanted"
    MEAN_WANTED = "mean_wanted"
    IN_HOST = "in_host"
    IN_DISK = "in_disk"
    IN_REMOTE = "in_remote"
    REMOTE_SILENT = "remote_silent"
    IN_ARRIVALS = "in_arrivals"
    LOAD_SLOWER = "load_slower_than_recompute"
    BEING_DROPPED = "being_dropped"
    RETAINED_LOST = "retained_lost"
    IMPORT_EVICTED = "import_evicted"


SENTENCES = {
    Reason.NOTHING_MORE: "everything up to the last multiple of 64 tokens was reused",
    Reason.BELOW_GRID: "the prompt is shorter than 64 tokens, the unit of reuse",
    Reason.CACHE_OFF: "the prefix cache is off",
    Reason.NEVER_COMPUTED: "the next 64 tokens were never computed before",
    Reason.OTHER_SALT: "the same tokens were computed under another salt",
    Reason.EVICTED: "the next 64 tokens were evicted",
    Reason.STATE_NEVER_KEPT: "more tokens matched, but no state to resume from was kept there",
    Reason.STATE_SKIPPED: "more tokens matched, but there was no memory for a state when they were computed",
    Reason.STATE_EVICTED: "more tokens matched, but the state to resume from was evicted",
    Reason.SCORES_WANTED: "the request needs log-probabilities of the prompt, so its tokens had to be computed",
    Reason.MEAN_WANTED: "the request needs the mean of the prompt's hidden states, so its tokens had to be computed",
    Reason.IN_HOST: "more is in host memory, but there was no room on the device to load it",
    Reason.IN_DISK: "more is on disk, but it could not be loaded",
    Reason.IN_REMOTE: "more is in the remote store, but it could not be loaded",
    Reason.REMOTE_SILENT: "the remote store did not answer in time",
    Reason.IN_ARRIVALS: "more has arrived from a prefill engine, but there was no room on the device to load it",
    Reason.LOAD_SLOWER: "more is in another tier, but loading it would take longer than computing it",
    Reason.BEING_DROPPED: "an operator is dropping it",
    Reason.RETAINED_LOST: "it was retained, but lost before its time: over its key's share, or memory ran out",
    Reason.IMPORT_EVICTED: "it was imported from a file, and evicted since",
}


@dataclass(frozen=True, slots=True)
class Miss:
    """How far a lookup got and what stopped it, in tokens."""

    reason: Reason
    cached: int  # resumed here
    kv_matched: int  # pages matched up to here
    reusable: int  # maximum that could have been reused: the prompt's last grid position
    tokens_lost: int

    @property
    def sentence(self) -> str:
        return SENTENCES[self.reason]

    def for_client(self) -> Miss:
        """Return the miss without a hint that another tenant sent these tokens."""
        if self.reason is not Reason.OTHER_SALT:
            return self
        return Miss(Reason.NEVER_COMPUTED, self.cached, self.kv_matched, self.reusable, self.tokens_lost)


def ranked_misses(lookups: Mapping[str, int], lost_tokens: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the reasons that occurred, most expensive first, with cost, count and description."""
    found = [
        {"reason": reason.value, "lost_tokens": lost_tokens[reason], "lookups": lookups[reason], "sentence": sentence}
        for reason, sentence in SENTENCES.items()
        if lookups.get(reason)
    ]
    return sorted(found, key=lambda each: -each["lost_tokens"])


@dataclass(frozen=True, slots=True)
class Lost:
    """A missing state: why, its class, and when it was last used."""

    reason: Reason  # STATE_EVICTED or STATE_SKIPPED
    kind: int | None = None
    used: int = 0

    def encode(self) -> int:
        """Return it as one number, because thousands of them are remembered.

        >>> Lost.decode(Lost(Reason.STATE_EVICTED, 7, 1 << 40).encode())
        Lost(reason=<Reason.STATE_EVICTED: 'state_evicted'>, kind=7, used=1099511627776)
        """
        kind = 0 if self.kind is None else self.kind + 1
        return (self.used << _KIND_BITS | kind) << 1 | (self.reason is Reason.STATE_EVICTED)

    @classmethod
    def decode(cls, number: int) -> Lost:
        kind = (number >> 1) % (1 << _KIND_BITS)
        reason = Reason.STATE_EVICTED if number % 2 else Reason.STATE_SKIPPED
        return cls(reason, kind - 1 if kind else None, number >> (1 + _KIND_BITS))


class Ghosts:
    """A bounded record of what is gone: keys of evicted cells, and of states that were evicted or skipped."""

    def __init__(self, limit: int = GHOSTS) -> None:
        self._cells = RecentKeys(limit)
        self._states = RecentKeys(limit)

    def add_cell(self, key: Key) -> None:
        self._cells.add(key)

    def add_state(self, key: Key, lost: Lost) -> None:
        self._states.add(key, lost.encode())

    def forget_cell(self, key: Key) -> None:
        self._cells.pop(key)

    def forget_state(self, key: Key) -> Lost | None:
        found = self._states.pop(key)
        return None if found is None else Lost.decode(found)

    def clear(self) -> None:
        self._cells.clear()
        self._states.clear()

    def reason(self, keys: list[Key], cached: int, matched: int) -> Reason:
        """Return why a lookup ended: `cached` and `matched` count the cells with a state and with pages."""
        if matched > cached:
            found = self._states.get(keys[matched - 1])
            return Reason.STATE_NEVER_KEPT if found is None else Lost.decode(found).reason
        return Reason.EVICTED if keys[matched] in self._cells else Reason.NEVER_COMPUTED

    def seen(self, keys: list[Key], matched: int, limit: int) -> int:
        """Return how many cells of a prompt are known to have been computed before, cached or not."""
        while matched < limit and keys[matched] in self._cells:
            matched += 1
        return matched

    def deepest_state(self, keys: list[Key], low: int, high: int) -> Key | None:
        """Return the deepest evicted state in (low, high]."""
        for depth in range(high, low, -1) if self._states else ():
            found = self._states.get(keys[depth - 1])
            if found is not None and Lost.decode(found).reason is Reason.STATE_EVICTED:
                return keys[depth - 1]
        return None


class Tenants:
    """The last salted key of each first cell, by its unsalted key. Bounded."""

    def __init__(self, limit: int = GHOSTS) -> None:
        self._last = RecentKeys(limit)

    def add(self, plain: Key, salted: Key) -> None:
        self._last.add(plain, short(salted))

    def others(self, plain: Key | None, salted: Key) -> bool:
        known = None if plain is None else self._last.get(plain)
        return known is not None and known != short(salted)
