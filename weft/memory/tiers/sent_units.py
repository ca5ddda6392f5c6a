"""A unit on its way between engines: the header of the disk tier's file, and the unit's bytes.

The header's `unit` is the unit's place in its prefix (`base/transfers.py`). Nothing here does input or output.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.base.transfers import ReservedUnit, StagedUnit
from weft.memory.captures import Origin
from weft.memory.kinds import Kind
from weft.memory.tiers.disk_format import UnitHeader, checksum


def header_of_staged(unit: StagedUnit, payload: bytes | memoryview) -> UnitHeader:
    """Return the header of a unit that is about to be sent."""
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


def misplaced(header: UnitHeader, granted: Mapping[int, ReservedUnit], sizes: Mapping[Kind, int]) -> str | None:
    """Return why a unit with this header is not accepted, or None if it belongs to one of the places granted."""
    place = granted.get(header.unit)
    if place is None:
        return f"the unit of place {header.unit} was not granted"
    expected = (Kind(place.kind), place.key, place.parent, place.position, sizes[Kind(place.kind)])
    if (header.kind, header.key, header.parent, header.position, header.size) != expected:
        return f"the unit of place {header.unit} is not the one that was granted"
    return None
