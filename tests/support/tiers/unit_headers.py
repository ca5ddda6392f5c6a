"""Units whose headers differ in one field from what is expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.tiers.disk_blocks import LAYOUT, UNIT_BYTES, FlakyBlocks, content, header
from weft.base.copies import UnitLabel
from weft.memory.captures import Origin
from weft.memory.kinds import Kind
from weft.memory.tiers.disk.file import DamagedUnit, DiskFile
from weft.memory.tiers.disk.format import UnitHeader, checksum
from weft.memory.tiers.remote import tier as remote_tier

KEY, OTHER = b"k" * 32, b"o" * 32
UNIT = 3
PAYLOAD = content(KEY, Kind.PAGE)
RIGHT = replace(header(Kind.PAGE, UNIT, KEY), size=len(PAYLOAD), checksum=checksum(PAYLOAD))
# The window page that begins where the page does.
AS_WINDOW = {"kind": Kind.WINDOW, "unit": 2 * UNIT, "size": UNIT_BYTES[Kind.WINDOW]}
WRONG: dict[str, dict[str, Any]] = {
    "key": {"key": OTHER},
    "one bit of the key": {"key": KEY[:-1] + b"\x6a"},
    "kind": {"kind": Kind.WINDOW},
    "kind and what follows from it": AS_WINDOW,
    "position": {"position": 128},
    "bytes": {"checksum": RIGHT.checksum ^ 1},
    "size": {"size": RIGHT.size - 1},
}


def in_file(wrong: UnitHeader) -> None:
    """Read a page whose bytes are right and whose header is this one."""
    blocks = FlakyBlocks(LAYOUT.size_bytes)
    file = DiskFile(blocks, LAYOUT)
    file.write([(RIGHT, memoryview(PAYLOAD))])
    blocks.write(LAYOUT.entry_of(Kind.PAGE, UNIT), wrong.encode())
    into = memoryview(bytearray(len(PAYLOAD)))
    for position in (RIGHT.position, None) if wrong.position == RIGHT.position else (RIGHT.position,):
        file.read(Kind.PAGE, UNIT, KEY, into, position)
        assert into == PAYLOAD


def in_store(wrong: UnitHeader) -> None:
    label = UnitLabel(KEY, None, RIGHT.position, Origin.PROMPT_END.value, RIGHT.tenant)
    found = remote_tier.decode_unit(wrong.encode() + PAYLOAD, Kind.PAGE, label, len(PAYLOAD))
    assert found == PAYLOAD


def check_headers(read: Callable[[UnitHeader], None], unchecked: tuple[str, ...] = ()) -> None:
    read(RIGHT)
    for name, fields in WRONG.items():
        if name not in unchecked:
            with pytest.raises(DamagedUnit):
                read(replace(RIGHT, **fields))


def check_file() -> None:
    check_headers(in_file)
    # A header that was written for another place.
    with pytest.raises(DamagedUnit):
        in_file(replace(RIGHT, unit=UNIT + 1))


def check_store() -> None:
    check_headers(in_store)
