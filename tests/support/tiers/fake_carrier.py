"""A carrier that reads the memory of its own process, at once or when a test lets it."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable

from weft.transfer.messages import Introduction, TransferError
from weft.transfer.pulling import address_of

METADATA = b"in this process"
_names = itertools.count()


class FakeCarrier:
    """With `held`, a read ends when `finish` is called. `log` has what happened, in order."""

    def __init__(self, held: bool = False) -> None:
        self.held = held
        # Whether reads can be made impossible.
        self.retires = True
        self.name = f"fake {next(_names)}"
        self.log: list[str] = []
        self.met: list[str] = []
        self.attending = 0
        self._reads: list[tuple[int, memoryview, Callable[[str | None], None]]] = []
        self._lock = threading.Lock()

    @property
    def reading(self) -> int:
        """The number of reads that are held."""
        return len(self._reads)

    def introduce(self) -> Introduction:
        return Introduction(self.name, METADATA)

    def meet(self, introduction: Introduction) -> None:
        self.met.append(introduction.name)
        if introduction.metadata != METADATA:
            raise TransferError("the metadata are not those of a peer")

    def read(self, peer: str, address: int, target: memoryview, ended: Callable[[str | None], None]) -> None:
        with self._lock:
            self._reads.append((address, target, ended))
        if not self.held:
            self.finish()

    def finish(self, error: str | None = None) -> None:
        """Let the oldest read end: it writes all of its bytes now, or fails."""
        with self._lock:
            address, target, ended = self._reads.pop(0)
        if error is None:
            ctypes.memmove(address_of(target), address, len(target))
        self.log.append("read")
        ended(error)

    def attend(self) -> None:
        with self._lock:
            self.attending += 1

    def leave(self) -> None:
        with self._lock:
            self.attending -= 1

    def retire(self, name: str) -> bool:
        self.log.append(f"retired {name}")
        self.name = f"fake {next(_names)}"
        return self.retires

    def close(self) -> None:
        while self._reads:
            self.finish("the carrier is closed")
