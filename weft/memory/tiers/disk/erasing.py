"""Overwrites the units of a dropped prefix in a file, in bounded parts beside the steps.

A unit that is to be erased leaves the index at once, and no other unit takes its place before its bytes are zeros. In
the file, it goes through three states: its header is first marked as doomed, then its bytes are overwritten, then its
header is cleared. Marks come first, because a header that stayed until its bytes were gone would be found by a restart
in between, and its unit served. Clearing headers first instead would forget where bytes still have to be overwritten;
a restart finds the marks and continues.

Marks hurry, because of what is not marked the next process knows nothing: several plans of them may be under way, no
path is saved before the last one is planned, and a process that ends makes them all. Zeros wait their turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from weft.memory.arena import Arena
from weft.memory.kinds import Kind

Unit = tuple[str, int]
# Units that one plan marks, and how many plans may be under way before the next one marks more units at once.
MOST_MARKED = 4096
MOST_PARTS = 8


@dataclass(frozen=True, slots=True)
class ErasedPart:
    """Units whose headers are marked, and units that are overwritten, by one plan.

    `evicted_too`: those that the plan clears anyway are marked and overwritten. They are free, so this comes before
    anything is written.
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
        # Under way, in the order of their plans.
        self._parts: deque[ErasedPart] = deque()
        # Bytes of units that are marked, or about to be.
        self._known_bytes = 0
        # Whether units that were evicted shortly before, and still have headers, are to be overwritten too.
        self._evicted_too = False
        # Whether a drop is under way: what is evicted meanwhile may be part of it.
        self.dropping = False
        # Marking or overwriting has failed. The next drop tries it again, and so does the end of the process. The next
        # process continues what is marked; of what is not, it knows nothing.
        self.failed = False
        self._stopping = False

    @property
    def marks_waiting(self) -> bool:
        """Whether there are units that the next process would still take for whole ones."""
        return not self.failed and bool(self._unmarked or self._evicted_too)

    @property
    def waiting(self) -> bool:
        """Whether there is more to plan."""
        return self.marks_waiting or (bool(self._marked) and not self.failed and not self._stopping)

    @property
    def busy(self) -> bool:
        return self.waiting or bool(self._parts)

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
        self._evicted_too = self._evicted_too or bool(self._arena.freed)
        self.failed = False
        try:
            yield
        finally:
            self._arena.withheld = None

    def note_evicted(self) -> None:
        """Let units that were evicted during a drop be overwritten; call it before a plan clears them."""
        self._evicted_too = self._evicted_too or (self.dropping and bool(self._arena.freed))

    def take_when_freed(self, units: Iterable[tuple[Kind, int]]) -> None:
        """Erase these units as soon as copies that are under way free them."""
        self._arena.withhold_when_freed({(kind.value, unit) for kind, unit in units}, self._unmarked)

    def resume(self, units: Iterable[tuple[Kind, int]]) -> None:
        """Take over units that an earlier process had marked, and that the arena has claimed."""
        found = [(kind.value, unit) for kind, unit in units]
        self._known_bytes += self._sum(found)
        self._marked += found

    def next_part(self, most_bytes: int) -> ErasedPart | None:
        """Return what the next plan marks or overwrites: at least one unit, beyond it no more than `most_bytes`.

        With 0 bytes, only marks.
        """
        if self.marks_waiting:
            return self._next_marks() if len(self._parts) < MOST_PARTS else None
        # All marks before any zeros: they are small, and from then on a restart finds nothing of the drop.
        if self._parts or not self.waiting or not most_bytes:
            return None
        erased: list[Unit] = []
        size = 0
        while self._marked and (not erased or size + self._bytes(self._marked[0]) <= most_bytes):
            erased.append(self._marked.popleft())
            size += self._bytes(erased[-1])
        return self._begin(ErasedPart(erased=tuple(erased), size_bytes=size))

    def _next_marks(self) -> ErasedPart:
        doomed = tuple(self._unmarked[-MOST_MARKED:])
        self._unmarked_bytes()
        size = self._sum(doomed)
        del self._unmarked[-MOST_MARKED:]
        self._counted, self._counted_bytes = len(self._unmarked), self._counted_bytes - size
        self._known_bytes += size
        return self._begin(ErasedPart(doomed=doomed, evicted_too=self._evicted_too))

    def evicted_part(self) -> ErasedPart | None:
        """Return what a plan that is made now must overwrite, whatever else it does, because it clears evicted units.

        Their headers are all that is known of them.
        """
        return self._begin(ErasedPart(evicted_too=True)) if self._evicted_too else None

    def _begin(self, part: ErasedPart) -> ErasedPart:
        self._parts.append(part)
        if part.evicted_too:
            self._evicted_too = False
        return part

    def _bytes(self, unit: Unit) -> int:
        return self._arena.unit_bytes[Kind(unit[0])]

    def _sum(self, units: Iterable[Unit]) -> int:
        return sum(map(self._bytes, units))

    def landed(self, part: ErasedPart) -> None:
        """Free what was overwritten."""
        self._end(part)
        self._marked += part.doomed
        self._known_bytes -= part.size_bytes
        known = len(self._arena.freed)
        for kind, unit in part.erased:
            self._arena.release(Kind(kind), unit)
        # Their headers are cleared already.
        del self._arena.freed[known:]

    def give_up(self, part: ErasedPart) -> None:
        """Keep what could not be marked or overwritten."""
        self._end(part)
        self.failed = True
        self._evicted_too = self._evicted_too or part.evicted_too
        self._known_bytes -= self._sum(part.doomed)
        self._unmarked += part.doomed
        self._marked.extendleft(part.erased)

    def _end(self, part: ErasedPart) -> None:
        oldest = self._parts.popleft()
        assert part is oldest

    def retry(self) -> None:
        """Try once more what has failed: the next process knows nothing of units that are not marked."""
        self.failed = False

    def stop(self) -> None:
        """Plan no more zeros, but all marks: the process ends, and the next one continues from them."""
        self._stopping = True

    def held(self) -> Iterator[tuple[Kind, int]]:
        under_way = (unit for part in self._parts for unit in (*part.doomed, *part.erased))
        for kind, unit in (*self._unmarked, *self._marked, *under_way):
            yield Kind(kind), unit
