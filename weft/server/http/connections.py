"""Open connections: how many there may be, in total and per address, and which one is closed for a new one.

Knows no socket and no HTTP. A connection that waits for its client (for headers, a handshake, the rest of a discarded
body, the next request) can be cut at any time; one with a request in progress cannot.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from weft.server.settings import Limits

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

log = logging.getLogger("weft")

# Descriptors reserved for files, the engine's pipes, and refusals in progress.
RESERVED_DESCRIPTORS = 24
# Refused connections that may still be sending their refusal.
MAX_REFUSED = 8
# More than any server needs; some systems allow a billion, and some libraries loop over all of them.
MOST_DESCRIPTORS = 1 << 20
LOG_SECONDS = 10.0


class Guest(Protocol):
    """An open connection. `share` is its key for the limit per address, if it has one."""

    share: str | None

    def cut(self) -> None:
        """Close at once and drop unsent bytes."""
        ...


class Occasionally:
    """Logs a warning at most every few seconds, with the number of suppressed ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def warn(self, message: str, *values: object) -> None:
        now = self._clock()
        if now < self._next.get(message, now):
            self._left_out[message] += 1
            return
        self._next[message] = now + LOG_SECONDS
        left_out = self._left_out.pop(message, 0)
        log.warning(message + "%s", *values, f" ({left_out} more since the last such line)" if left_out else "")


class Connections:
    """All open connections of a server: at most `bound` in total and `per_address` for each address."""

    def __init__(self, bound: int, per_address: int) -> None:
        self.bound = bound
        self._per_address = per_address
        self._open: set[Guest] = set()
        # In the order in which they started to wait.
        self._waiting: dict[Guest, None] = {}
        self._by_share: dict[str, dict[Guest, None]] = {}
        self._refused: dict[Guest, None] = {}
        self.warnings = Occasionally()
        # Number of times that each bound was met.
        self.crowded: Counter[str] = Counter()
        self.left: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._open)

    # coming and going -------------------------------------------------------------------------------------------------

    def enter(self, guest: Guest) -> tuple[int, str] | None:
        """Register a connection; return the status and message of a refusal if there is no room.

        The connection cannot be cut before `waits` is called for it. A refused connection is registered too, until it
        leaves: only a few may be sending their refusal at a time.
        """
        refusal = self.join(guest) or self._make_room()
        if refusal is None:
            self._open.add(guest)
            return None
        self.part(guest)
        if len(self._refused) >= MAX_REFUSED:
            self._cut(next(iter(self._refused)))
        self._refused[guest] = None
        return refusal

    def leave(self, guest: Guest) -> None:
        """Unregister a closed connection, whose descriptor is free."""
        self._forget(guest)
        self.left()

    def _forget(self, guest: Guest) -> None:
        self._open.discard(guest)
        self._waiting.pop(guest, None)
        self._refused.pop(guest, None)
        self.part(guest)

    def waits(self, guest: Guest) -> None:
        """Mark a connection as waiting for its client, so that it can be cut."""
        self._waiting.pop(guest, None)
        if guest in self._open:
            self._waiting[guest] = None

    def works(self, guest: Guest) -> None:
        """Mark a connection as having a request in progress."""
        self._waiting.pop(guest, None)

    def _make_room(self) -> tuple[int, str] | None:
        if len(self._open) < self.bound:
            return None
        self.crowded["total"] += 1
        self.warnings.warn("all %d connections are in use: closing the longest idle ones", self.bound)
        if self.cut_longest_waiting():
            return None
        return 503, f"all {self.bound} connections of the server are in use; try again later"

    def cut_longest_waiting(self) -> bool:
        """Close the connection that has waited longest for its client; return whether there was one."""
        for guest in self._waiting:
            self._cut(guest)
            return True
        return False

    def _cut(self, guest: Guest) -> None:
        # It no longer counts, although its descriptor is free only after this iteration of the loop.
        self._forget(guest)
        guest.cut()

    # addresses --------------------------------------------------------------------------------------------------------

    def join(self, guest: Guest) -> tuple[int, str] | None:
        """Count a connection for its address; return the status and message of a refusal if there are too many.

        A waiting connection of the same address is cut first.
        """
        if guest.share is None:
            return None
        peers = self._by_share.setdefault(guest.share, {})
        if len(peers) >= self._per_address:
            self.crowded["address"] += 1
            self.warnings.warn("%s has reached its limit of %d connections", guest.share, self._per_address)
            waiting = next((peer for peer in peers if peer in self._waiting), None)
            if waiting is None:
                return 429, f"this address has reached its limit of {self._per_address} connections; close some or wait"
            self._cut(waiting)
        self._by_share.setdefault(guest.share, {})[guest] = None
        return None

    def part(self, guest: Guest) -> None:
        """Stop counting a connection for its address."""
        if guest.share is not None:
            peers = self._by_share.get(guest.share, {})
            peers.pop(guest, None)
            if not peers:
                self._by_share.pop(guest.share, None)


# descriptors ----------------------------------------------------------------------------------------------------------


def bounded_connections(limits: Limits) -> Connections:
    """Return an empty registry within the limits and within the descriptors of this process."""
    return Connections(min(limits.connections, descriptors_for_connections()), limits.connections_per_address)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of file descriptors to the hard limit, where there are such limits."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptors_for_connections() -> int:
    """Return how many descriptors clients may use: those neither in use nor reserved, but at least one."""
    if resource is None:
        return MOST_DESCRIPTORS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    return max(1, soft - len(os.listdir("/dev/fd")) - RESERVED_DESCRIPTORS)
