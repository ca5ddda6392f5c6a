"""Copies to a file keep their order where it matters, and do not wait for each other where it does not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from math import ceil
from threading import Event, Semaphore

import pytest

from tests.support.tiers.disk_blocks import IDENTITY, LAYOUT, FlakyBlocks, content
from weft.base.copies import CopyPlan, Direction, UnitCopy, UnitLabel
from weft.memory.kinds import Kind
from weft.memory.tiers.disk import file as disk_file
from weft.memory.tiers.disk import tier as disk_tier
from weft.memory.tiers.disk.file import DiskFile
from weft.memory.tiers.disk.format import BLOCK, ENTRY, DiskLayout, checksum, decode
from weft.memory.tiers.disk.tier import HELPERS, DiskCopies

# What does not come within this time never does.
NEVER_SECONDS = 20.0


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


def test_loads_of_large_units_do_not_wait_for_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_file, "PIECE_BYTES", BLOCK)
    blocks = GatedBlocks()
    copies = copying(blocks)
    saved, gate, writing = copies.copy(states([0])), Event(), Semaphore(0)
    wait_for(saved.parts, NEVER_SECONDS)

    def before(offset: int) -> None:
        writing.release()
        assert gate.wait(NEVER_SECONDS)

    blocks.before = before
    saves = [copies.copy(states(range(first, first + 4))) for first in (4, 8, 12)]
    try:
        for _ in range(HELPERS):
            assert writing.acquire(timeout=NEVER_SECONDS)
        load = copies.copy(replace(states([0]), direction=Direction.LOAD))
        assert not wait_for(load.parts, NEVER_SECONDS / 4).not_done
        assert not any(copies.copied(save, wait=False) for save in saves)
    finally:
        gate.set()
        copies.close()


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


def test_headers_are_written_when_the_payloads_of_their_plan_are_durable() -> None:
    check_headers_follow_payloads()


@pytest.mark.parametrize(
    ("kind", "requests", "largest"),
    [
        (Kind.PAGE, 50 / 32, 32 * ENTRY),  # one beside the other
        (Kind.WINDOW, 50 / 10, 9 * 3 * ENTRY + ENTRY),  # every third place
        (Kind.STATE, 50, ENTRY),  # too far apart to be written with what is between them
    ],
)
def test_a_request_that_marks_units_is_bounded(kind: Kind, requests: float, largest: int, monkeypatch) -> None:
    monkeypatch.setattr(disk_file, "HEADERS_BYTES", 32 * ENTRY)
    layout = DiskLayout.of(IDENTITY, {Kind.PAGE: BLOCK, Kind.WINDOW: 3 * BLOCK, Kind.STATE: 17 * BLOCK}, 4 << 20)
    blocks, sizes = FlakyBlocks(layout.size_bytes), []
    file = DiskFile(blocks, layout)
    blocks.fail = lambda offset, size: sizes.append(size)
    file.doom([(kind, unit) for unit in range(50)])
    assert max(sizes) == largest
    assert len(sizes) == ceil(requests)
    file.reread()
    assert sorted(file.doomed) == [(kind, unit) for unit in range(50)]
