"""Overwrites the units of a dropped prefix in a file, in bounded parts beside the steps.

A unit that is to be erased leaves the index at once, and no other unit takes its place before its bytes are zeros. In
the file, it goes through three states: its header is first marked as doomed, then its bytes are overwritten, then its
header is cleared. Marks come first, because a header that stayed until its bytes were gone would be found by a restart
in between, and its unit served. Clearing headers first instead would forget where bytes still have to be overwritten;
a restart finds the marks and continues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from weft.memory.arena import Arena
from weft.memory.kinds import Kind

Unit = tuple[str, int]
# Units that one plan marks.
MOST_MARKED = 4096


@dataclass(frozen=True, slots=True)
class ErasedPart:
    """Units whose headers are marked, and units that are overwritten, by one plan.

    `evicted_too`: so are those that the plan clears anyway. They are free, so this comes before anything is written.
    """

    doomed: tuple[Unit, ...] = ()
    erased: tuple[Unit, ...] = ()
    size_bytes: int = 0
    evicted_too: bool = False


class Erasing:
    """Owns the units of one tier that are to be overwritten, until they are."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        # The arena adds to it. Of the first `_counted` units, the bytes are known.
        self._unmarked: list[Unit] = []
        self._counted = self._counted_bytes = 0
        self._marked: deque[Unit] = deque()
        self._part: ErasedPart | None = None
        # Bytes of units that are marked, or about to be.
        self._known_bytes = 0
        # Whether units that were evicted shortly before, and still have headers, are to be overwritten too.
        self._evicted_too = False
        # Marking or overwriting has failed. The next drop tries it again, and so does the end of the process. The next
        # process continues what is marked; of what is not, it knows nothing.
        self.failed = False

    @property
    def waiting(self) -> bool:
        """Whether there is more to plan."""
        return not self.failed and bool(self._unmarked or self._marked or self._evicted_too)

    @property
    def busy(self) -> bool:
        return self.waiting or self._part is not None

    @property
    def left_bytes(self) -> int:
        """Bytes of units that are not overwritten yet."""
        return self._known_bytes + self._unmarked_bytes()

    def _unmarked_bytes(self) -> int:
        self._counted_bytes += self._sum(self._unmarked[self._counted :])
        self._counted = len(self._unmarked)
        return self._counted_bytes

    @contextmanager
    def taking_freed(self) -> Iterator[None]:
        """Erase the units that are freed inside, and those that were freed before and still have headers."""
        self._arena.withheld = self._unmarked
        self._evicted_too = bool(self._arena.freed)
        self.failed = False
        try:
            yield
        finally:
            self._arena.withheld = None

    def take_when_freed(self, units: Iterable[tuple[Kind, int]]) -> None:
        """Erase these units as soon as copies that are under way free them."""
        self._arena.withhold_when_freed({(kind.value, unit) for kind, unit in units}, self._unmarked)

    def resume(self, units: Iterable[tuple[Kind, int]]) -> None:
        """Take over units that an earlier process had marked, and that the arena has claimed."""
        found = [(kind.value, unit) for kind, unit in units]
        self._known_bytes += self._sum(found)
        self._marked += found

    def next_part(self, most_bytes: int) -> ErasedPart | None:
        """Return what the next plan marks or overwrites: at least one unit, beyond it no more than `most_bytes`."""
        if self._part is not None or not self.waiting:
            return None
        if self._unmarked or self._evicted_too:
            # All marks before any zeros: they are small, and from then on a restart finds nothing of the drop.
            doomed = self._unmarked[-MOST_MARKED:]
            self._part = ErasedPart(doomed=tuple(doomed), evicted_too=self._evicted_too)
            self._unmarked_bytes()
            size = self._sum(doomed)
            del self._unmarked[-MOST_MARKED:]
            self._counted, self._counted_bytes = len(self._unmarked), self._counted_bytes - size
            self._known_bytes += size
            self._evicted_too = False
            return self._part
        erased: list[Unit] = []
        size = 0
        while self._marked and (not erased or size + self._bytes(self._marked[0]) <= most_bytes):
            erased.append(self._marked.popleft())
            size += self._bytes(erased[-1])
        self._part = ErasedPart(erased=tuple(erased), size_bytes=size)
        return self._part

    def _bytes(self, unit: Unit) -> int:
        return self._arena.unit_bytes[Kind(unit[0])]

    def _sum(self, units: Iterable[Unit]) -> int:
        return sum(map(self._bytes, units))

    def landed(self, part: ErasedPart) -> None:
        """Free what was overwritten."""
        assert part is self._part
        self._part = None
        self._marked += part.doomed
        self._known_bytes -= part.size_bytes
        known = len(self._arena.freed)
        for kind, unit in part.erased:
            self._arena.release(Kind(kind), unit)
        # Their headers are cleared already.
        del self._arena.freed[known:]

    def give_up(self, part: ErasedPart) -> None:
        """Keep what could not be marked or overwritten."""
        assert part is self._part
        self._part = None
        self.failed = True
        self._evicted_too = part.evicted_too
        self._known_bytes -= self._sum(part.doomed)
        self._unmarked += part.doomed
        self._marked.extendleft(part.erased)

    def retry(self) -> None:
        """Try once more what has failed: the next process knows nothing of units that are not marked."""
        self.failed = False

    def stop(self) -> None:
        """Plan nothing more: the process ends, and the next one continues."""
        self.failed = True

    def held(self) -> Iterator[tuple[Kind, int]]:
        part = self._part or ErasedPart()
        for kind, unit in (*self._unmarked, *self._marked, *part.doomed, *part.erased):
            yield Kind(kind), unit
