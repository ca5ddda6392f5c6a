"""Memory is moved to large pages where it lies, and ranges that are near each other are moved as one."""

from __future__ import annotations

import mmap
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.kernels.large_pages import BETWEEN, joined, use_large_pages

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MEBIBYTE = 1 << 20


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8))))
def test_ranges_are_joined_where_less_than_a_gap_is_between_them(steps):
    unit = BETWEEN // 2
    ranges = [(start * unit, (start + length) * unit) for start, length in steps]
    found = list(joined(ranges))
    covered = {place for start, end in ranges for place in range(start // unit, end // unit)}
    # A gap of up to two units belongs to both sides.
    expected = {place for place in range(50) if place in covered or is_between(place, covered)}
    assert {place for start, end in found for place in range(start // unit, end // unit)} == expected
    assert all(end + BETWEEN < start for (_, end), (start, _) in pairwise(found))


def is_between(place: int, covered: set[int]) -> bool:
    return any(one in covered and other in covered for one, other in ((place - 1, place + 1), (place - 1, place + 2),
                                                                      (place - 2, place + 1)))  # fmt: skip


def large_bytes(address: int) -> int:
    """Return how much of the memory around an address is in large pages."""
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(number, 16) for number in part.split(" ")[0].split("-"))
        if start <= address < end:
            return int(part.partition("\nAnonHugePages:")[2].split()[0]) << 10
    return 0


@pytest.mark.skipif(
    sys.platform != "linux" or not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="no large pages here"
)
def test_memory_that_was_written_is_moved_and_says_the_same():
    memory = mmap.mmap(-1, 16 * MEBIBYTE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    numbers = torch.frombuffer(memory, dtype=torch.int32)
    numbers.copy_(torch.arange(len(numbers), dtype=torch.int32))
    before = large_bytes(numbers.data_ptr())
    use_large_pages([numbers[25:]])
    found = large_bytes(numbers.data_ptr())
    assert torch.equal(numbers, torch.arange(len(numbers), dtype=torch.int32))
    if found == before:
        pytest.skip("this system moves no memory by itself: before Linux 6.1, or memory is short")
    assert found - before >= 12 * MEBIBYTE
