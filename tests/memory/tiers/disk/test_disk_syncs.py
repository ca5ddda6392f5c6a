"""What a failed sync has lost is never reported as written or dropped, whichever thread it failed in."""

from __future__ import annotations

import errno
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from tests.support.tiers.disk_blocks import LAYOUT, UNIT_BYTES, FlakyBlocks, header
from tests.support.tiers.disk_syncs import check_failed_syncs
from weft.memory.kinds import Kind
from weft.memory.tiers.disk.block_file import FileBlocks
from weft.memory.tiers.disk.file import DiskFile

# What does not come within this time never does.
NEVER_SECONDS = 300.0


@pytest.mark.parametrize("seed", range(40))
def test_what_a_failed_sync_has_lost_is_never_reported_as_written_or_dropped(seed: int) -> None:
    check_failed_syncs(seed)


def test_a_sync_that_fails_is_counted_before_another_thread_syncs(tmp_path: Path, monkeypatch) -> None:
    """The system reports a loss once, so the second one returns as if nothing had happened."""
    blocks, seen = FileBlocks(tmp_path / "file"), []
    with ThreadPoolExecutor(1) as other:
        waiting: list[Future[None]] = []

        def fdatasync(file: int) -> None:
            seen.append(blocks.failed_syncs)
            if len(seen) == 1:
                waiting.append(other.submit(blocks.sync))
                raise OSError(errno.EIO, "a bad sector")

        monkeypatch.setattr(os, "fdatasync", fdatasync)
        with pytest.raises(OSError, match="a bad sector"):
            blocks.sync()
        waiting[0].result(NEVER_SECONDS)
    assert seen == [0, 1]
    blocks.close()


def test_a_plan_whose_payloads_were_lost_by_the_sync_of_another_writes_no_headers() -> None:
    blocks = FlakyBlocks(LAYOUT.size_bytes)
    file = DiskFile(blocks, LAYOUT)
    units = [
        (header(Kind.STATE, unit, bytes([unit]) * 32), memoryview(bytes(UNIT_BYTES[Kind.STATE]))) for unit in (1, 2)
    ]
    staged = [file.stage([unit]) for unit in units]
    for task in (task for staging in staged for task in staging.tasks):
        task()
    blocks.fail_sync(Random(0))
    for staging in staged:
        with pytest.raises(OSError, match="a sync has failed meanwhile"):
            file.commit(staging)
    assert not DiskFile(blocks, LAYOUT).found
    file.write(units)
    assert len(DiskFile(blocks, LAYOUT).found) == 2
