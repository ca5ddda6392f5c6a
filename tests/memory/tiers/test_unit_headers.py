"""A unit is used only if its header says everything that is expected of it: in a file, a store and a transfer.

Each header here is whole, with the right checksum of its own, and differs in one field.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiers.disk_blocks import LAYOUT, UNIT_BYTES, FlakyBlocks, content, header
from tests.support.tiers.unit_headers import (
    AS_WINDOW,
    KEY,
    OTHER,
    PAYLOAD,
    RIGHT,
    UNIT,
    WRONG,
    check_file,
    check_headers,
    check_store,
)
from weft.base.copies import UnitLabel
from weft.base.errors import InvalidOption
from weft.base.transfers import ReservedUnit
from weft.memory.captures import Origin
from weft.memory.kinds import Kind
from weft.memory.tiers.disk import prefix_file
from weft.memory.tiers.disk.file import DamagedUnit, DiskFile, WantedUnit
from weft.memory.tiers.disk.format import ENTRY, UnitHeader, checksum, decode
from weft.memory.tiers.exchange.sent_units import GrantedPlaces
from weft.memory.tiers.remote import tier as remote_tier


def in_transfer(wrong: UnitHeader) -> None:
    granted = GrantedPlaces(UNIT_BYTES)
    granted.grant([ReservedUnit(UNIT, Kind.PAGE.value, 9, KEY, None, RIGHT.position)])
    reason = granted.misplaced(wrong, 0)
    if reason is not None:
        raise DamagedUnit(reason)


def in_prefix_file(wrong: UnitHeader, folder: Path) -> None:
    path = folder / "prefix"
    head = prefix_file.PrefixHead(LAYOUT.identity, LAYOUT.unit_bytes, 1)
    path.write_bytes(head.encode() + wrong.encode() + PAYLOAD)
    file = DiskFile(FlakyBlocks(LAYOUT.size_bytes), LAYOUT)
    assert prefix_file.import_prefix(file, path) == 1
    file.reread()
    [found] = file.found
    into = memoryview(bytearray(len(PAYLOAD)))
    file.read(Kind.PAGE, found.unit, KEY, into)
    assert into == PAYLOAD


def check_transfer() -> None:
    # The receiver compares the bytes of a piece, and a piece may be shorter than its unit.
    check_headers(in_transfer, unchecked=("bytes", "size"))
    for fields in ({"parent": OTHER}, {"unit": UNIT + 1}, {"size": len(PAYLOAD) + 1}, {"size": 0}):
        with pytest.raises(DamagedUnit):
            in_transfer(replace(RIGHT, **fields))


def test_a_unit_in_a_file_is_read_only_under_its_own_header() -> None:
    check_file()


def test_an_object_of_a_store_is_read_only_under_its_own_header() -> None:
    check_store()


@pytest.mark.parametrize("payload", [PAYLOAD + b"!", PAYLOAD[:-1], b""])
def test_an_object_of_another_length_is_no_unit_whatever_its_checksum(payload: bytes) -> None:
    label = UnitLabel(KEY, None, RIGHT.position, Origin.PROMPT_END.value, RIGHT.tenant)
    entry = replace(RIGHT, checksum=checksum(payload)).encode()
    with pytest.raises(DamagedUnit):
        remote_tier.decode_unit(entry + payload, Kind.PAGE, label, len(PAYLOAD))


def test_a_unit_is_received_only_where_its_header_was_granted() -> None:
    check_transfer()


@pytest.mark.parametrize("swapped", range(4))
def test_a_unit_of_another_key_is_a_miss_among_units_that_are_read_at_once(swapped: int) -> None:
    file = DiskFile(FlakyBlocks(LAYOUT.size_bytes), LAYOUT)
    keys = [bytes([unit]) * 32 for unit in range(4)]
    file.write([(header(Kind.PAGE, unit, key), memoryview(content(key, Kind.PAGE))) for unit, key in enumerate(keys)])
    into = [memoryview(bytearray(len(PAYLOAD))) for _ in keys]
    wanted = [WantedUnit(Kind.PAGE, unit, key, into[unit]) for unit, key in enumerate(keys)]
    file.read_run(wanted)
    assert into == [content(key, Kind.PAGE) for key in keys]
    wanted[swapped] = replace(wanted[swapped], key=OTHER)
    with pytest.raises(DamagedUnit, match="is another unit"):
        file.read_run(wanted)
    assert file.damaged == 1


@pytest.mark.parametrize("name", ["kind", "kind and what follows from it", "bytes", "size"])
def test_a_unit_of_a_prefix_file_is_imported_only_if_it_is_what_its_header_says(name: str, tmp_path: Path) -> None:
    in_prefix_file(RIGHT, tmp_path)
    with pytest.raises(InvalidOption, match="is damaged at unit 0"):
        in_prefix_file(replace(RIGHT, **WRONG[name]), tmp_path)


def test_a_unit_of_a_prefix_file_with_another_key_is_found_under_that_key_only(tmp_path: Path) -> None:
    with pytest.raises(DamagedUnit, match="is another unit"):
        in_prefix_file(replace(RIGHT, key=OTHER), tmp_path)


def test_a_prefix_is_exported_only_with_the_units_that_its_headers_named(tmp_path: Path) -> None:
    """Another process has overwritten the unit since the headers were read."""
    blocks = FlakyBlocks(LAYOUT.size_bytes)
    file = DiskFile(blocks, LAYOUT)
    file.write([(RIGHT, memoryview(PAYLOAD))])
    file.reread()
    assert file.found
    file.write([(replace(RIGHT, key=OTHER), memoryview(content(OTHER, Kind.PAGE)))])
    with pytest.raises(InvalidOption, match="was not written"):
        prefix_file.export_prefix(file, KEY, tmp_path / "prefix")
    assert not (tmp_path / "prefix").exists()


@pytest.mark.parametrize("fields", [{"key": OTHER}, {"position": 128}, AS_WINDOW])
def test_a_rank_keeps_only_units_that_the_first_rank_has_under_the_same_header(fields: dict[str, Any]) -> None:
    """After a crash, the same place may hold different units on different ranks."""
    first, blocks = DiskFile(FlakyBlocks(LAYOUT.size_bytes), LAYOUT), FlakyBlocks(LAYOUT.size_bytes)
    other = DiskFile(blocks, LAYOUT)
    apart = replace(RIGHT, unit=UNIT + 8)
    differs = replace(RIGHT, **fields)
    first.write([(each, memoryview(PAYLOAD)) for each in (RIGHT, apart)])
    other.write([(each, memoryview(PAYLOAD[: UNIT_BYTES[each.kind]])) for each in (differs, apart)])
    first.reread()
    other.reread()
    other.erase_all_but(first.rows)
    after = DiskFile(blocks, LAYOUT)
    assert [each.unit for each in after.found] == [apart.unit]
    place = LAYOUT.offset_of(Kind.PAGE, UNIT)
    assert not any(blocks.now[place : place + UNIT_BYTES[differs.kind]])


def sealed(fields: bytes) -> bytes:
    """Return an entry of these bytes with the right checksum."""
    return fields[: ENTRY - 8] + struct.pack("<Q", checksum(fields[: ENTRY - 8]))


@pytest.mark.parametrize(("place", "value"), [(0, b"WFTD"), (0, b"WFTV"), (4, b"\x01\x00"), (6, b"\x03"), (7, b"\xff")])
def test_a_header_of_another_form_is_no_header(place: int, value: bytes) -> None:
    """One that was dropped and whose bytes are still there, of another version, kind or origin."""
    whole = RIGHT.encode()
    entry = sealed(whole[:place] + value + whole[place + len(value) :])
    assert decode(sealed(whole)) == RIGHT
    assert decode(entry) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"unit": UNIT + 1},
        {"unit": 1 << 40},
        {"unit": (1 << 63) - 1},
        {"size": RIGHT.size - 1},
        {"kind": Kind.WINDOW},
        {"kind": Kind.STATE, "size": UNIT_BYTES[Kind.STATE]},
    ],
)
def test_a_header_that_does_not_belong_where_it_lies_is_counted_and_names_no_unit(fields: dict[str, Any]) -> None:
    blocks = FlakyBlocks(LAYOUT.size_bytes)
    file = DiskFile(blocks, LAYOUT)
    file.write([(RIGHT, memoryview(PAYLOAD))])
    assert len(DiskFile(blocks, LAYOUT).rows) == 1
    blocks.write(LAYOUT.entry_of(Kind.PAGE, UNIT), replace(RIGHT, **fields).encode())
    after = DiskFile(blocks, LAYOUT)
    assert (len(after.rows), after.damaged) == (0, 1)


def test_a_header_of_a_unit_that_would_end_behind_the_file_names_no_unit() -> None:
    blocks = FlakyBlocks(LAYOUT.size_bytes)
    DiskFile(blocks, LAYOUT)
    state = LAYOUT.slabs * LAYOUT.slab_bytes // LAYOUT.padded[Kind.STATE]
    beyond = replace(RIGHT, kind=Kind.STATE, unit=state, size=UNIT_BYTES[Kind.STATE])
    assert LAYOUT.entry_of(Kind.STATE, state) <= LAYOUT.payload_offset - ENTRY
    blocks.write(LAYOUT.entry_of(Kind.STATE, state), beyond.encode())
    after = DiskFile(blocks, LAYOUT)
    assert (len(after.rows), after.damaged) == (0, 1)


def test_a_header_of_another_version_names_no_unit() -> None:
    blocks = FlakyBlocks(LAYOUT.size_bytes)
    DiskFile(blocks, LAYOUT)
    whole = RIGHT.encode()
    blocks.write(LAYOUT.entry_of(Kind.PAGE, UNIT), sealed(whole[:4] + b"\x01\x00" + whole[6:]))
    after = DiskFile(blocks, LAYOUT)
    assert (len(after.rows), after.damaged) == (0, 1)


@pytest.mark.parametrize("byte", [0, 5, 6, 7, 8, 16, 24, 56, 88, 104, 112, ENTRY - 1])
def test_a_header_that_was_damaged_anywhere_is_no_header(byte: int) -> None:
    blocks = FlakyBlocks(LAYOUT.size_bytes)
    file = DiskFile(blocks, LAYOUT)
    file.write([(RIGHT, memoryview(PAYLOAD))])
    damaged = bytearray(RIGHT.encode())
    damaged[byte] ^= 1
    blocks.write(LAYOUT.entry_of(Kind.PAGE, UNIT), bytes(damaged))
    with pytest.raises(DamagedUnit, match="has no header"):
        file.read(Kind.PAGE, UNIT, KEY, memoryview(bytearray(len(PAYLOAD))))


def test_a_prefix_file_that_ends_early_is_damaged_whatever_its_checksum(tmp_path: Path) -> None:
    head = prefix_file.PrefixHead(LAYOUT.identity, LAYOUT.unit_bytes, 1)
    short = replace(RIGHT, checksum=checksum(PAYLOAD[:-1]))
    (tmp_path / "prefix").write_bytes(head.encode() + short.encode() + PAYLOAD[:-1])
    with pytest.raises(InvalidOption, match="is damaged at unit 0"):
        prefix_file.import_prefix(DiskFile(FlakyBlocks(LAYOUT.size_bytes), LAYOUT), tmp_path / "prefix")


def test_a_prefix_file_with_units_of_other_sizes_is_refused(tmp_path: Path) -> None:
    head = prefix_file.PrefixHead(LAYOUT.identity, {**LAYOUT.unit_bytes, Kind.STATE: 1}, 0)
    (tmp_path / "prefix").write_bytes(head.encode())
    with pytest.raises(InvalidOption, match="belongs to another model"):
        prefix_file.import_prefix(DiskFile(FlakyBlocks(LAYOUT.size_bytes), LAYOUT), tmp_path / "prefix")


@pytest.mark.parametrize("byte", [0, 8, 12, 16, 48, 56, 64, 72, 80])
def test_a_prefix_file_whose_head_was_damaged_anywhere_is_none(byte: int, tmp_path: Path) -> None:
    head = bytearray(prefix_file.PrefixHead(LAYOUT.identity, LAYOUT.unit_bytes, 0).encode())
    head[byte] ^= 1
    (tmp_path / "prefix").write_bytes(bytes(head))
    with pytest.raises(InvalidOption, match="is no prefix file of this version"):
        prefix_file.import_prefix(DiskFile(FlakyBlocks(LAYOUT.size_bytes), LAYOUT), tmp_path / "prefix")
