"""Copies between two tiers of memory as a frozen value: the second kind of plan.

Like a step's plan, it is complete when it is created and consists of plain integers. The device executes the copies of
one direction in the order of their launch, beside its steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol


class Direction(StrEnum):
    SAVE = "save"  # from the upper tier, nearer to the kernels, to the lower one
    LOAD = "load"


class UnitCopy(NamedTuple):
    """One unit of memory: its kind, and its index in the upper and in the lower tier."""

    kind: str
    upper: int
    lower: int


class UnitPiece(NamedTuple):
    """The bytes [start, end) of a unit."""

    start: int
    end: int


class UnitLabel(NamedTuple):
    """What a unit is, for a tier that outlives the process.

    A page has the keys of its cell and of the one above. A state and its window pages have the key of the resume point;
    `position` is where a window page ends.
    """

    key: bytes
    parent: bytes | None
    position: int
    origin: str
    tenant: bytes


class Run(NamedTuple):
    """`length` units that lie side by side in both tiers, so that one copy moves them."""

    kind: str
    upper: int
    lower: int
    length: int

    def precedes(self, unit: UnitCopy) -> bool:
        return (self.kind, self.upper + self.length, self.lower + self.length) == unit


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """`after_steps`: begin only when the steps that were launched before have ended.

    Paranoid mode needs that, because a step in flight may still fill a unit with NaN that was freed before it.
    Otherwise a freed unit is not touched by any step in flight. A lower tier that outlives the process also needs
    `labels`, one for each unit, and `cleared`, its units that were freed since the last save. The headers of `doomed`
    units are marked, so that no other process uses them, and the bytes of `erased` ones are overwritten. `level` counts
    pairs of tiers from the device down. With a `piece`, only those bytes of each unit are copied.
    """

    number: int
    direction: Direction
    units: tuple[UnitCopy, ...]
    size_bytes: int
    after_steps: bool = False
    labels: tuple[UnitLabel, ...] = ()
    cleared: tuple[tuple[str, int], ...] = ()
    doomed: tuple[tuple[str, int], ...] = ()
    erased: tuple[tuple[str, int], ...] = ()
    level: int = 0
    piece: UnitPiece | None = None

    def runs(self) -> Iterator[Run]:
        """Yield the copies in the order of memory, with neighbours joined.

        >>> units = (UnitCopy("page", 5, 8), UnitCopy("page", 4, 7), UnitCopy("page", 9, 9))
        >>> [tuple(run) for run in CopyPlan(0, Direction.SAVE, units, 0).runs()]
        [('page', 4, 7, 2), ('page', 9, 9, 1)]
        """
        last: Run | None = None
        for unit in sorted(self.units):
            if last is not None and last.precedes(unit):
                last = last._replace(length=last.length + 1)
                continue
            if last is not None:
                yield last
            last = Run(*unit, 1)
        if last is not None:
            yield last


class PlanCopies(Protocol):
    """Makes the copies of plans."""

    def copy(self, plan: CopyPlan) -> Any: ...

    def copied(self, flight: Any, wait: bool) -> float | None: ...


class TierCopies(PlanCopies, Protocol):
    """Makes the copies of one tier."""

    load_bytes_per_second: float | None

    def close(self) -> None:
        """Finish what is under way, and release what is more than memory."""
