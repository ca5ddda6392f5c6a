"""Which states are kept: tables of positions in, positions out; and how far apart, from real models' bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from weft.memory.captures import positions_to_capture, spacing
from weft.memory.spec import AttentionMemory, MemorySpec, Part, RecurrentMemory


def recurrent(state: tuple[int, ...], conv: tuple[int, int]) -> RecurrentMemory:
    width, channels = conv
    parts = (Part("conv", (width - 1, channels), "bfloat16"),)
    parts += (Part("matrix", state, "float32"),) if state else ()
    return RecurrentMemory(parts, (Part("conv", (channels,), "bfloat16"),), width)


LFM2_1B = MemorySpec((recurrent((), (3, 2048)),) * 10 + (AttentionMemory(8, 64, "bfloat16"),) * 6)
QWEN3_NEXT_80B = MemorySpec((recurrent((32, 128, 128), (4, 8192)),) * 36 + (AttentionMemory(2, 256, "bfloat16"),) * 12)
LLAMA = MemorySpec((AttentionMemory(8, 128, "bfloat16"),) * 32)
GEMMA = MemorySpec((AttentionMemory(8, 256, "bfloat16", 1024),) * 40 + (AttentionMemory(8, 256, "bfloat16"),) * 8)


@pytest.mark.parametrize(("spec", "distance"), [(LFM2_1B, 64), (QWEN3_NEXT_80B, 8192), (LLAMA, 64), (GEMMA, 2048)])
def test_the_spacing_follows_from_what_a_resume_point_costs(spec: MemorySpec, distance: int) -> None:
    assert spacing(spec) == distance


@pytest.mark.parametrize(
    ("interval", "prompt", "junction", "asked", "expected"),
    [
        ((0, 200), 200, 0, (), [192]),  # the end of the prompt
        ((0, 256), 256, 0, (), [192]),  # ... of which one token must be left to compute
        ((0, 63), 63, 0, (), []),  # below the grid
        ((0, 128), 300, 0, (), []),  # a chunk in the middle
        ((128, 300), 300, 0, (), [256]),  # the last chunk
        ((0, 500), 500, 192, (), [192, 448]),  # the junction
        ((192, 500), 500, 192, (), [448]),  # a junction that was passed already
        ((0, 500), 500, 0, (100, 320), [64, 320, 448]),  # declared positions go to the grid
        ((0, 2100), 2100, 0, (), [1024, 2048]),  # every 1024; here the prompt's end is one of them
        ((1000, 1100), 5000, 0, (), [1024]),
    ],
)
def test_positions_to_capture(interval, prompt, junction, asked, expected) -> None:
    start, end = interval
    found = positions_to_capture(start, end, prompt=prompt, junction=junction, asked=asked, every=1024, cell=64)
    assert found == expected


def test_chunks_capture_what_the_whole_captures() -> None:
    whole = positions_to_capture(0, 3000, prompt=3000, junction=640, asked=(777,), every=512, cell=64)
    cuts = [0, 1, 63, 64, 65, 700, 705, 1500, 2999, 3000]
    pieces = []
    for start, end in pairwise(cuts):
        pieces += positions_to_capture(start, end, prompt=3000, junction=640, asked=(777,), every=512, cell=64)
    assert pieces == whole
