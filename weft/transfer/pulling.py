"""Pulled payloads: what a carrier such as NIXL must do, and how two engines agree to use one.

The receiver reads staged units out of the sender's memory. Everything else stays on the authenticated connection:
offers, grants, headers with checksums, confirmations. `docs/disaggregation.md` has the protocol and its rules.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from weft.transfer.messages import Introduction, TransferError

log = logging.getLogger("weft")

# Peers whose reads have failed, and reasons for TCP that were logged: a bound for what is remembered.
MOST_REMEMBERED = 64


def address_of(view: memoryview) -> int:
    """Return the address of a piece of memory."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


class Carrier(Protocol):
    """Reads memory of other processes into the area that it has registered. Any thread may call it."""

    def introduce(self) -> Introduction:
        """Return what a peer needs to read the registered area. Raises `TransferError` if there is no agent."""
        ...

    def meet(self, introduction: Introduction) -> None:
        """Prepare to read from a peer. Raises `TransferError` if that is not possible."""

    def read(self, peer: str, address: int, target: memoryview, ended: Callable[[str | None], None]) -> None:
        """Read into a registered piece of memory.

        `ended` is called once, from any thread, when the read writes no more; an error says why the bytes are not
        there. It is called within a bounded time, whatever the peer does.
        """

    def attend(self) -> None:
        """Serve the reads of peers until `leave` was called as often."""

    def leave(self) -> None: ...

    def retire(self, name: str) -> bool:
        """Make reads under an introduction impossible; return False if that cannot be done."""
        ...

    def close(self) -> None:
        """End all reads and threads."""


class NotPulled(TransferError):
    """Payloads of a transfer go over its connection; the message says why."""


@dataclass(slots=True)
class Carriage:
    """How an engine's payloads travel: `asked` is the option, and `missing` says why there is no carrier."""

    asked: str = "tcp"
    carrier: Carrier | None = None
    missing: str = "--transfer is tcp"
    _failed: dict[str, str] = field(default_factory=dict)
    _logged: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def strict(self) -> bool:
        return self.asked == "nixl"

    def introduce(self, encrypted: bool) -> Introduction:
        """Return the introduction for an offer. Raises `NotPulled`."""
        if self.carrier is None:
            raise NotPulled(self.missing)
        if encrypted and not self.strict:
            raise NotPulled("the connection is encrypted, and reads over NIXL would not be")
        try:
            return self.carrier.introduce()
        except TransferError as error:
            raise NotPulled(str(error)) from error

    def meet(self, introduction: Introduction | None) -> str:
        """Return the peer to read from. Raises `NotPulled`."""
        if self.carrier is None:
            raise NotPulled(self.missing)
        if introduction is None:
            raise NotPulled("the prefill engine does not offer NIXL")
        with self._lock:
            failed = self._failed.get(introduction.name)
        if failed is not None and not self.strict:
            raise NotPulled(f"an earlier read has failed: {failed}")
        try:
            self.carrier.meet(introduction)
        except TransferError as error:
            raise NotPulled(str(error)) from error
        return introduction.name

    def note_failure(self, peer: str, error: str) -> None:
        """Remember a peer that cannot be read from, although its connection works."""
        with self._lock:
            self._failed[peer] = error
            if len(self._failed) > MOST_REMEMBERED:
                del self._failed[next(iter(self._failed))]

    def note_fallback(self, reason: str) -> None:
        """Log, once for each reason, that payloads go over TCP."""
        with self._lock:
            if self.asked == "tcp" or reason in self._logged or len(self._logged) >= MOST_REMEMBERED:
                return
            self._logged.add(reason)
        log.info("payloads of prefixes travel over TCP: %s", reason)


class Readings:
    """Counts the reads of one transfer that may still write."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def begin(self) -> None:
        with self._changed:
            self._count += 1

    def end(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until no read writes any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count)
