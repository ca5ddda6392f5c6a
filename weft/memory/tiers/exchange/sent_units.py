"""A unit on its way between engines: the header of the disk tier's file, and the unit's bytes, whole or in pieces.

The header's `unit` is the unit's place in its prefix (`base/transfers.py`); size and checksum are those of the piece.
Nothing here does input or output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from weft.base.copies import UnitPiece
from weft.base.transfers import ReservedUnit, StagedUnit
from weft.memory.captures import Origin
from weft.memory.kinds import Kind
from weft.memory.tiers.disk.format import UnitHeader, checksum


def piece_of(unit: StagedUnit, sizes: Mapping[Kind, int]) -> UnitPiece:
    """Return which bytes of its unit are sent, given the sizes of units."""
    return UnitPiece(0, sizes[Kind(unit.kind)]) if unit.piece is None else unit.piece


def header_of_staged(unit: StagedUnit, payload: bytes | memoryview) -> UnitHeader:
    """Return the header of a unit, or of a piece of one, that is about to be sent."""
    return UnitHeader(
        Kind(unit.kind),
        unit.place,
        unit.position,
        unit.key,
        unit.parent,
        unit.tenant.ljust(16, b"\0"),
        Origin.PROMPT_END,
        len(payload),
        checksum(payload),
    )


@dataclass(slots=True)
class GrantedPlace:
    """A place that may be filled: [0, begun) is under way or here; `filled` bytes are here, with right checksums."""

    reserved: ReservedUnit
    size: int
    begun: int = 0
    filled: int = 0


class GrantedPlaces:
    """Places of a prefix that were granted and are not filled yet.

    The pieces of a unit begin in order and without gaps, so a unit is whole when all its bytes are there.
    """

    def __init__(self, sizes: Mapping[Kind, int]) -> None:
        self._sizes = sizes
        self.places: dict[int, GrantedPlace] = {}

    def __iter__(self) -> Iterator[ReservedUnit]:
        return (place.reserved for place in self.places.values())

    def grant(self, units: Iterable[ReservedUnit]) -> None:
        for unit in units:
            self.places[unit.place] = GrantedPlace(unit, self._sizes[Kind(unit.kind)])

    def misplaced(self, header: UnitHeader, start: int) -> str | None:
        """Return why a piece with this header is not accepted at `start`, or None if it is what must come next."""
        place = self.places.get(header.unit)
        if place is None:
            return f"the unit of place {header.unit} was not granted"
        unit = place.reserved
        expected = (Kind(unit.kind), unit.key, unit.parent, unit.position)
        if (header.kind, header.key, header.parent, header.position) != expected:
            return f"the unit of place {header.unit} is not the one that was granted"
        if start != place.begun or not 0 < header.size <= place.size - start:
            return (
                f"bytes {start} to {start + header.size} of the unit of place {header.unit} must begin at "
                f"{place.begun} and end at most at {place.size}"
            )
        return None

    def begin(self, header: UnitHeader) -> ReservedUnit:
        """Note that a piece that is not misplaced is being written; return where its unit belongs."""
        place = self.places[header.unit]
        place.begun += header.size
        return place.reserved

    def fill(self, header: UnitHeader) -> bool:
        """Note that a piece is there; return whether its unit is whole. Then its place is filled."""
        place = self.places[header.unit]
        place.filled += header.size
        if place.filled < place.size:
            return False
        del self.places[header.unit]
        return True
