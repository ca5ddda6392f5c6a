"""Which states are worth keeping: pure functions of positions and bytes.

The one place that decides it, for whole, chunked and speculative steps alike. The ledger asks and acts.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.base.grid import floor_to_grid
from weft.memory.spec import MemorySpec

MAX_SPACING = 8192
# States at twice their own weight in KV apart take at most half as much memory as the KV between them.
KV_PER_STATE = 2


def spacing(spec: MemorySpec) -> int:
    """How far apart regular snapshots lie: a power of two of tokens, from what a resume point costs against its KV.

    A state worth 7 tokens of KV is kept at every cell; one worth 3,100 tokens every 8,192.
    """
    cost = spec.state_bytes + spec.window_cells * spec.window_page_bytes
    per_token = (spec.page_bytes + spec.window_page_bytes) / spec.cell
    distance = spec.cell
    while distance < MAX_SPACING * spec.cell // 64 and (not per_token or distance * per_token < KV_PER_STATE * cost):
        distance *= 2
    return distance


def repeatable(prompt: int, cell: int) -> int:
    """The last grid position that the same prompt, sent again, can resume from: one token must be left to compute.

    >>> repeatable(128, 64), repeatable(129, 64)
    (64, 128)
    """
    return floor_to_grid(prompt - 1, cell)


def positions_to_capture(
    start: int, end: int, *, prompt: int, junction: int, asked: Iterable[int], every: int, cell: int
) -> list[int]:
    """Grid positions in (start, end] whose state should be kept for others.

    The end of the prompt, the junction where an earlier sequence parted from this one, positions that the caller (or a
    waiting sequence) asked for, and every `every` tokens.

    >>> positions_to_capture(0, 300, prompt=300, junction=128, asked=[70], every=192, cell=64)
    [64, 128, 192, 256]
    """
    chosen = {repeatable(prompt, cell), junction, *(floor_to_grid(p, cell) for p in asked)}
    chosen.update(range(start - start % every + every, end + 1, every))
    return sorted(p for p in chosen if start < p <= end)
