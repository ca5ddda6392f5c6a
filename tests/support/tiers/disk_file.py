"""Units that are written to a file and read again."""

from __future__ import annotations

from random import Random

from tests.support.tiers.disk_blocks import LAYOUT, UNIT_BYTES, FlakyBlocks, content, header
from weft.base.copies import CopyPlan, Direction, UnitCopy, UnitLabel
from weft.memory.arena import Arena
from weft.memory.kinds import Kind
from weft.memory.tiers.disk.file import DamagedUnit, DiskFile


def read(file: DiskFile, kind: Kind, unit: int, key: bytes) -> bytes:
    into = bytearray(UNIT_BYTES[kind])
    file.read(kind, unit, key, memoryview(into))
    return bytes(into)


def check_found(file: DiskFile) -> tuple[int, int]:
    """Read everything that was found: right bytes, or damaged. Return the numbers of both."""
    whole = damaged = 0
    for each in file.found:
        try:
            assert read(file, each.kind, each.unit, each.key) == content(each.key, each.kind), "wrong bytes"
            whole += 1
        except DamagedUnit:
            damaged += 1
    return whole, damaged


def fresh() -> tuple[DiskFile, FlakyBlocks]:
    blocks = FlakyBlocks(LAYOUT.size_bytes)
    return DiskFile(blocks, LAYOUT), blocks


def saving(*units: tuple[Kind, int, bytes]) -> CopyPlan:
    labels = tuple(UnitLabel(key, None, 64, "prompt_end", b"") for _, _, key in units)
    copies = tuple(UnitCopy(kind.value, unit, unit) for kind, unit, _ in units)
    return CopyPlan(0, Direction.SAVE, copies, 0, labels=labels)


class Writer:
    """Fills a file with units of random kinds, over and over."""

    def __init__(self, file: DiskFile, random: Random) -> None:
        self.file = file
        self.random = random
        self.arena = Arena(LAYOUT.padded, LAYOUT.slabs * LAYOUT.slab_bytes, remember_freed=True)
        self.live: dict[bytes, tuple[Kind, int]] = {}

    def write(self) -> None:
        kind, key = self.random.choice(list(UNIT_BYTES)), self.random.randbytes(32)
        while (unit := self.arena.take(kind)) is None:
            gone = self.random.choice(list(self.live))
            self.arena.release(*self.live.pop(gone))
        cleared = [(Kind(each), number) for each, number in self.arena.freed]
        self.arena.freed.clear()
        self.live[key] = (kind, unit)
        self.file.write([(header(kind, unit, key), memoryview(content(key, kind)))], cleared)
