"""The disk tier moves much with each request, through a few pieces of memory that belong to one request at a time."""

from __future__ import annotations

import errno
import mmap
from contextlib import suppress
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.support.tiers.disk_blocks import IDENTITY, LAYOUT, FlakyBlocks, content, header
from tests.support.tiers.disk_file import saving
from tests.support.tiers.disk_requests import check_pieces_have_one_owner, copy
from weft.base.copies import Direction
from weft.memory.kinds import Kind
from weft.memory.tiers.disk import file as disk_file
from weft.memory.tiers.disk.file import DiskFile
from weft.memory.tiers.disk.format import BLOCK, DiskLayout
from weft.memory.tiers.disk.tier import DiskCopies


class CountedBlocks(FlakyBlocks):
    """Notes the offset, the size and the memory of every request."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.calls: list[tuple[int, int, int]] = []

    def read(self, offset: int, into: memoryview) -> None:
        self.calls.append((offset, len(into), address(into)))
        super().read(offset, into)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        self.calls.append((offset, len(data), address(data)))
        super().write(offset, data)


def address(part: bytes | memoryview) -> int:
    return np.frombuffer(part, np.uint8).__array_interface__["data"][0]


@pytest.mark.parametrize("direction", Direction)
def test_units_side_by_side_move_in_one_request(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_file, "PIECE_BYTES", 8 * BLOCK)
    # States are smaller than pages, so that headers of pages do not lie side by side.
    sizes = {Kind.PAGE: 2 * BLOCK, Kind.STATE: BLOCK}
    layout = DiskLayout.of(IDENTITY, sizes, 1 << 20)
    blocks = CountedBlocks(layout.size_bytes)
    file, memory = DiskFile(blocks, layout), memoryview(mmap.mmap(-1, 40 * BLOCK))
    memory[:] = Random("memory").randbytes(len(memory))
    before = bytes(memory)
    places = [(Kind.PAGE, unit) for unit in (4, 5, 6, 7, 8, 9, 11)] + [(Kind.STATE, 40)]
    copies = DiskCopies(file, lambda kind, unit: memory[sizes[kind] * (unit % 20) :][: sizes[kind]])
    plan = saving(*((kind, unit, bytes([unit]) * 32) for kind, unit in places))
    for way in [Direction.SAVE] + [Direction.LOAD] * (direction is Direction.LOAD):
        blocks.calls.clear()
        if way is Direction.LOAD:
            memory[:] = bytes(len(memory))
        copy(copies, replace(plan, direction=way))
    copies.close()
    for kind, unit in places:
        first = sizes[kind] * (unit % 20)
        assert memory[first : first + sizes[kind]] == before[first : first + sizes[kind]]
    headers = [each for each in blocks.calls if each[0] < layout.payload_offset]
    payloads = sorted(each[:2] for each in blocks.calls if each[0] >= layout.payload_offset)
    # Headers of each run are cleared once and written once, or read once.
    assert len(headers) == (6 if direction is Direction.SAVE else 4)
    runs = [[(Kind.PAGE, unit) for unit in run] for run in ([4, 5, 6, 7], [8, 9], [11])] + [[(Kind.STATE, 40)]]
    assert payloads == sorted((layout.offset_of(*run[0]), sum(sizes[kind] for kind, _ in run)) for run in runs)


def test_a_piece_of_memory_belongs_to_one_request_until_its_bytes_are_copied() -> None:
    check_pieces_have_one_owner()


def test_requests_one_after_the_other_use_the_same_memory_also_after_failures() -> None:
    blocks = CountedBlocks(LAYOUT.size_bytes)
    file, key = DiskFile(blocks, LAYOUT), b"k" * 32
    unit, into = memoryview(content(key, Kind.STATE)), memoryview(bytearray(content(key, Kind.STATE)))

    def fail(offset: int, size: int) -> None:
        if offset >= LAYOUT.payload_offset:
            raise OSError(errno.EIO, "a bad sector")

    for attempt in range(6):
        blocks.fail = fail if attempt in (1, 3) else lambda offset, size: None
        with suppress(OSError):
            file.write([(header(Kind.STATE, attempt, key), unit)])
    written = [each[2] for each in blocks.calls if each[0] >= LAYOUT.payload_offset]
    assert len(written) == 6
    assert len(set(written)) == 1
    blocks.calls.clear()
    for attempt in (0, 2, 4, 5):
        file.read(Kind.STATE, attempt, key, into)
    read = [each[2] for each in blocks.calls if each[0] >= LAYOUT.payload_offset]
    assert len(read) == 4
    assert len(set(read)) == 1
    # Loads do not wait for saves.
    assert read[0] != written[0]
