"""Copies to a file whose payloads are late."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from threading import Event

import pytest

from tests.support.tiers.disk_blocks import LAYOUT, FlakyBlocks, content
from weft.base.copies import CopyPlan, Direction, UnitCopy, UnitLabel
from weft.memory.kinds import Kind
from weft.memory.tiers.disk import tier as disk_tier
from weft.memory.tiers.disk.file import DiskFile
from weft.memory.tiers.disk.format import BLOCK, ENTRY, checksum, decode
from weft.memory.tiers.disk.tier import DiskCopies

# What does not come within this time never does.
NEVER_SECONDS = 300.0


class GatedBlocks(FlakyBlocks):
    """Calls `before` with the offset of each write of a payload, and counts units whose headers came too early."""

    def __init__(self) -> None:
        super().__init__(LAYOUT.size_bytes)
        self.before: Callable[[int], None] = lambda offset: None
        self.headers: list[tuple[int, bool]] = []

    def write(self, offset: int, data: bytes | memoryview) -> None:
        if offset >= LAYOUT.payload_offset:
            self.before(offset)
        with self._lock:
            super().write(offset, data)
            if BLOCK <= offset < LAYOUT.payload_offset:
                self._note_headers(bytes(data))

    def _note_headers(self, entries: bytes) -> None:
        for first in range(0, len(entries), ENTRY):
            header = decode(entries[first : first + ENTRY])
            if header is not None:
                place = LAYOUT.offset_of(header.kind, header.unit)
                durable = checksum(bytes(self.durable[place : place + header.size])) == header.checksum
                self.headers.append((header.unit, durable))


def states(units: Sequence[int]) -> CopyPlan:
    labels = tuple(UnitLabel(bytes([unit]) * 32, None, 64, "prompt_end", b"") for unit in units)
    copies = tuple(UnitCopy(Kind.STATE.value, unit, unit) for unit in units)
    return CopyPlan(0, Direction.SAVE, copies, 0, labels=labels)


def copying(blocks: FlakyBlocks) -> DiskCopies:
    return DiskCopies(
        DiskFile(blocks, LAYOUT), lambda kind, unit: memoryview(bytearray(content(bytes([unit]) * 32, kind)))
    )


def check_headers_follow_payloads() -> None:
    """Save two plans at once. The payloads of a plan are held back until the thread that commits it waits for them."""
    blocks = GatedBlocks()
    plans = [[2, 3], [5, 9]]
    gates = {unit: gate for units in plans for gate in [Event()] for unit in units}
    closed = [gates[units[0]] for units in plans]

    def before(offset: int) -> None:
        unit = next(unit for unit in gates if LAYOUT.offset_of(Kind.STATE, unit) == offset)
        assert gates[unit].wait(NEVER_SECONDS)

    def wait_and_open(parts: Collection[Future[object]], seconds: float | None = None) -> object:
        if seconds is None:
            # For the payloads of the next plan.
            closed.pop(0).set()
        return wait_for(parts, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_tier, "wait_for", wait_and_open)
        copies, blocks.before = copying(blocks), before
        flights = [copies.copy(states(units)) for units in plans]
        for flight in flights:
            while copies.copied(flight, wait=True) is None:
                pass
        copies.close()
    assert blocks.headers == [(unit, True) for units in plans for unit in units], "a header before its payload"
