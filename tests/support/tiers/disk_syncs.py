"""Syncs of a file that fail."""

from __future__ import annotations

from contextlib import suppress
from random import Random

from tests.support.tiers.disk_blocks import LAYOUT
from tests.support.tiers.disk_file import Writer, check_found, fresh
from weft.memory.kinds import Kind
from weft.memory.tiers.disk.file import DiskFile


def check_failed_syncs(seed: int) -> None:
    """Write, drop and sync while syncs fail, lose power, and check that what was reported as done had been done."""
    random = Random(f"syncs {seed}")
    file, blocks = fresh()
    writer = Writer(file, random)
    doomed: set[tuple[Kind, int]] = set()
    erased: set[tuple[Kind, int]] = set()
    blocks.forget = random
    for _ in range(60):
        with suppress(OSError):
            if random.random() < 0.7 or len(writer.live) < 4:
                writer.write()
                continue
            # These units stay with the arena, so that no other overwrites them.
            units = [writer.live.pop(key) for key in random.sample(sorted(writer.live), 2)]
            file.doom(units)
            doomed.update(units)
            file.erase(units)
            erased.update(units)
    blocks.forget = None
    blocks.lose_power(random)
    after = DiskFile(blocks, LAYOUT)
    check_found(after)
    assert doomed.isdisjoint((each.kind, each.unit) for each in after.found), "a dropped unit was found"
    for kind, unit in erased:
        place = LAYOUT.offset_of(kind, unit)
        assert not any(blocks.durable[place : place + LAYOUT.padded[kind]]), "bytes of a dropped unit"
