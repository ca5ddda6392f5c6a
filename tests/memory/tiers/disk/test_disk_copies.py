"""Copies to a file keep their order where it matters, and do not wait for each other where it does not."""

from __future__ import annotations

from concurrent.futures import wait as wait_for
from dataclasses import replace
from math import ceil
from threading import Event, Semaphore

import pytest

from tests.support.tiers.disk_blocks import IDENTITY, FlakyBlocks
from tests.support.tiers.disk_copies import NEVER_SECONDS, GatedBlocks, check_headers_follow_payloads, copying, states
from weft.base.copies import Direction
from weft.memory.kinds import Kind
from weft.memory.tiers.disk import file as disk_file
from weft.memory.tiers.disk.file import DiskFile
from weft.memory.tiers.disk.format import BLOCK, ENTRY, DiskLayout
from weft.memory.tiers.disk.tier import HELPERS


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
