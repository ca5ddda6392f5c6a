"""Weights get memory of their own, in large pages where the system has them, which ends with the last of them."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from pathlib import Path

import pytest
import torch

from weft.kernels import large_pages
from weft.kernels.large_pages import LARGE, LEAST_BYTES, LINE, SHARED_BYTES

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MEBIBYTE = 1 << 20


def mapping_of(address: int) -> str | None:
    """Return what the system says about the memory around an address."""
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(number, 16) for number in part.split(" ")[0].split("-"))
        if start <= address < end:
            return part
    return None


def test_tensors_overlap_nowhere_and_begin_with_a_line_of_the_cache():
    sizes = [(3, LEAST_BYTES // 2), (LEAST_BYTES,), (1, SHARED_BYTES // 4 + 1), (7, 5), (0, 3), (LEAST_BYTES + 1,)] * 3
    found = [large_pages.empty(*size, dtype=torch.bfloat16) for size in sizes]
    for number, tensor in enumerate(found):
        assert tensor.data_ptr() % LINE == 0 or not tensor.numel()
        tensor.fill_(number)
    assert [tuple(tensor.shape) for tensor in found] == sizes
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(found))


def test_what_is_larger_than_a_mapping_gets_its_own():
    wanted = SHARED_BYTES + 3
    found = large_pages.empty(wanted, dtype=torch.uint8)
    found[0] = found[-1] = 1
    assert len(found) == wanted


def test_memory_ends_with_the_last_tensor_in_it(monkeypatch):
    room = large_pages.WeightRoom()
    monkeypatch.setattr(large_pages, "ROOM", room)
    first, second = (large_pages.empty(SHARED_BYTES // 2, dtype=torch.uint8) for _ in range(2))
    memory = weakref.ref(room.memory)
    assert memory() is not None
    third = large_pages.empty(SHARED_BYTES // 2, dtype=torch.uint8)
    del first
    gc.collect()
    assert memory() is not None
    del second
    gc.collect()
    assert memory() is None
    third.fill_(1)


@pytest.mark.skipif(
    sys.platform != "linux" or not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="no large pages here"
)
def test_large_pages_are_asked_for_before_memory_is_touched():
    memory, first = large_pages.mapped(9 * MEBIBYTE)
    numbers = torch.frombuffer(memory, dtype=torch.uint8)[first:]
    assert numbers.data_ptr() % LARGE == 0
    # hg: the system may use large pages. Whether it does depends on how much memory is in one piece.
    flags = (mapping_of(numbers.data_ptr()) or "").partition("VmFlags:")[2].split("\n")[0].split()
    assert "hg" in flags
