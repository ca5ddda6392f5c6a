"""The disk tier moves much with each request, from and to where units lie."""

from __future__ import annotations

import mmap
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.disk_blocks import FlakyBlocks
from tests.test_disk_file import saving
from weft.base.copies import Direction
from weft.memory.kinds import Kind
from weft.memory.tiers import disk_file
from weft.memory.tiers.disk_file import DiskFile
from weft.memory.tiers.disk_format import BLOCK, DiskLayout
from weft.memory.tiers.disk_tier import DiskCopies


class CountedBlocks(FlakyBlocks):
    """Notes where memory lies that is read or written, by the offset in the file."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.calls: list[tuple[int, list[int]]] = []

    def read(self, offset: int, *into: memoryview) -> None:
        self.calls.append((offset, [address(part) for part in into]))
        super().read(offset, *into)

    def write(self, offset: int, *parts: bytes | memoryview) -> None:
        self.calls.append((offset, [address(part) for part in parts]))
        super().write(offset, *parts)


def address(part: bytes | memoryview) -> int:
    return np.frombuffer(part, np.uint8).__array_interface__["data"][0]


@pytest.mark.parametrize("direction", Direction)
def test_units_side_by_side_move_in_one_request_from_and_to_where_they_lie(direction: Direction, monkeypatch):
    monkeypatch.setattr(disk_file, "PIECE_BYTES", 8 * BLOCK)
    # States are smaller than pages, so that headers of pages do not lie side by side.
    sizes = {Kind.PAGE: 2 * BLOCK, Kind.STATE: BLOCK}
    layout = DiskLayout.of(b"f" * 32, sizes, 1 << 20)
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
        flight = copies.copy(replace(plan, direction=way))
        while copies.copied(flight, wait=True) is None:
            pass
    copies.close()
    for kind, unit in places:
        first = sizes[kind] * (unit % 20)
        assert memory[first : first + sizes[kind]] == before[first : first + sizes[kind]]
    headers = [each for each in blocks.calls if each[0] < layout.payload_offset]
    payloads = sorted(each for each in blocks.calls if each[0] >= layout.payload_offset)
    # Headers of each run are cleared once and written once, or read once.
    assert len(headers) == (6 if direction is Direction.SAVE else 4)
    start = address(memory)
    runs = [[(Kind.PAGE, unit) for unit in run] for run in ([4, 5, 6, 7], [8, 9], [11])] + [[(Kind.STATE, 40)]]
    assert payloads == sorted(
        (layout.offset_of(*run[0]), [start + sizes[kind] * (unit % 20) for kind, unit in run]) for run in runs
    )
