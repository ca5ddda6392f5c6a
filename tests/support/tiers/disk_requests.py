"""Pieces of memory that requests to a file share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Barrier

import pytest

from tests.support.tiers.disk_blocks import LAYOUT, FlakyBlocks, content
from tests.support.tiers.disk_file import saving
from weft.base.copies import CopyPlan, Direction
from weft.base.errors import CopyFailed
from weft.memory.kinds import Kind
from weft.memory.tiers.disk import file as disk_file
from weft.memory.tiers.disk.file import REQUESTS, DiskFile
from weft.memory.tiers.disk.reused_memory import ReusedMemory
from weft.memory.tiers.disk.tier import DiskCopies

# What does not come within this time never does.
NEVER_SECONDS = 300.0


class MeetingBlocks(FlakyBlocks):
    """Payloads of several requests are under way at once: none of them goes on until all have their bytes."""

    def __init__(self, requests: int) -> None:
        super().__init__(LAYOUT.size_bytes)
        self._all_there = Barrier(requests)

    def read(self, offset: int, into: memoryview) -> None:
        super().read(offset, into)
        if offset >= LAYOUT.payload_offset:
            self._all_there.wait(NEVER_SECONDS)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        if offset >= LAYOUT.payload_offset:
            self._all_there.wait(NEVER_SECONDS)
        super().write(offset, data)


class OverwrittenMemory(ReusedMemory):
    """Overwrites a piece as soon as it is returned, as the next request might."""

    @contextmanager
    def piece(self) -> Iterator[memoryview]:
        with super().piece() as taken:
            yield taken
            taken[:] = b"\xff" * len(taken)


def copy(copies: DiskCopies, plan: CopyPlan) -> None:
    flight = copies.copy(plan)
    while copies.copied(flight, wait=True) is None:
        pass


def check_pieces_have_one_owner() -> None:
    """Save and load units in requests that have their bytes at the same time, with pieces that change afterwards."""
    units = [(Kind.STATE, unit, bytes([unit]) * 32) for unit in range(1, 2 * REQUESTS, 2)]
    blocks = MeetingBlocks(len(units))
    memory = {unit: memoryview(bytearray(content(key, kind))) for kind, unit, key in units}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_file, "ReusedMemory", OverwrittenMemory)
        copies = DiskCopies(DiskFile(blocks, LAYOUT), lambda kind, unit: memory[unit])
    plan = saving(*units)
    try:
        copy(copies, plan)
        for kind, unit, key in units:
            place = LAYOUT.offset_of(kind, unit)
            assert blocks.now[place:][: len(memory[unit])] == content(key, kind), "wrong bytes in the file"
            memory[unit][:] = bytes(len(memory[unit]))
        try:
            copy(copies, replace(plan, direction=Direction.LOAD))
        except CopyFailed as error:
            raise AssertionError("a whole unit was not read") from error
        assert all(memory[unit] == content(key, kind) for kind, unit, key in units), "wrong bytes in memory"
    finally:
        copies.close()
