"""Decides which states are worth keeping: pure functions of positions and bytes.

The only place that decides it, for whole, chunked and speculative steps alike. The ledger calls it and acts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Set
from dataclasses import dataclass
from enum import StrEnum

from weft.base.grid import floor_to_grid
from weft.memory.spec import MemorySpec

MAX_SPACING = 8192
# With states this many times their own size in KV apart, states take at most half as much memory as the KV between.
KV_PER_STATE = 2
# Candidates lie this share of their depth apart, so that a prompt that diverges anywhere loses half of it on average.
CANDIDATE_SHARE = 1 / 16
# The end of a prompt often changes in the next turn, so all of its last cells are candidates.
CANDIDATES_AT_END = 8
# After this many prompts without a hit on their candidates, fewer are written.
UNPROVED = 32


class Origin(StrEnum):
    """Why a state was kept."""

    DECLARED = "declared"  # by the caller, or by a request that waits for it
    PROMPT_END = "prompt_end"
    JUNCTION = "junction"  # an earlier sequence diverged from this one here, as pages or a hit show
    RECALLED = "recalled"  # cells up to here were computed before, and evicted since
    BOUNDARY = "boundary"  # a message ends
    REGULAR = "regular"  # every N tokens
    ANSWER_END = "answer_end"  # where a sequence ended or was preempted
    CANDIDATE = "candidate"  # the prefill passed here while memory was free
    IMPORTED = "imported"  # it came from a prefix file


ORIGINS = tuple(Origin)


@dataclass(frozen=True, slots=True)
class CaptureReasons:
    """The enabled reasons. The end of a prompt and declared points always are."""

    junction: bool = True
    popular: bool = True  # ends of recently evicted cells, and learning what is wanted
    boundaries: bool = True
    regular: bool = True
    answers: bool = True
    candidates: bool = True


ALL_CAPTURES = CaptureReasons()


def spacing(spec: MemorySpec) -> int:
    """Return the distance of regular snapshots: a power of two of tokens, from the size of a resume point in KV.

    A state as large as 7 tokens of KV is kept at every cell; one as large as 3,100 tokens every 8,192.
    """
    cost = spec.state_bytes + spec.window_cells * spec.window_page_bytes
    per_token = (spec.page_bytes + spec.window_page_bytes) / spec.cell
    distance = spec.cell
    while distance < MAX_SPACING * spec.cell // 64 and (not per_token or distance * per_token < KV_PER_STATE * cost):
        distance *= 2
    return distance


def repeatable(prompt: int, cell: int) -> int:
    """Return the last position from which the same prompt, sent again, can resume: one token must be left to compute.

    >>> repeatable(128, 64), repeatable(129, 64)
    (64, 128)
    """
    return floor_to_grid(prompt - 1, cell)


def positions_to_capture(
    start: int,
    end: int,
    *,
    prompt: int,
    junction: int,
    asked: Iterable[int],
    every: int,
    cell: int,
    boundaries: Iterable[int] = (),
    recalled: int = 0,
) -> list[int]:
    """Return the grid positions in (start, end] whose state should be kept for later requests.

    These are the end of the prompt, the junction where an earlier sequence diverged, the end of recalled cells,
    positions that the caller (or a waiting sequence) asked for, ends of messages, and every `every` tokens. Zero means
    no junction, nothing recalled, no regular distance.

    >>> positions_to_capture(0, 300, prompt=300, junction=128, asked=[70], every=192, cell=64)
    [64, 128, 192, 256]
    """
    chosen = {repeatable(prompt, cell), junction, recalled}
    chosen.update(p - p % cell for p in asked)
    chosen.update(p - p % cell for p in boundaries)
    if every:
        chosen.update(range(start - start % every + every, end + 1, every))
    return sorted(p for p in chosen if start < p <= end)


def origin_of(
    position: int,
    *,
    prompt: int,
    junction: int,
    asked: Set[int],
    boundaries: Set[int],
    every: int,
    cell: int,
    recalled: int = 0,
) -> Origin:
    """Return why a position is kept: the first reason that applies. `asked` and `boundaries` lie on the grid.

    >>> origin_of(128, prompt=300, junction=128, asked=set(), boundaries=set(), every=64, cell=64).value
    'junction'
    """
    if position in asked:
        return Origin.DECLARED
    if position == junction:
        return Origin.JUNCTION
    if position == repeatable(prompt, cell):
        return Origin.PROMPT_END
    if position in boundaries:
        return Origin.BOUNDARY
    if position == recalled:
        return Origin.RECALLED
    return Origin.REGULAR if position > prompt or (every and position % every == 0) else Origin.CANDIDATE


def candidates(start: int, end: int, cell: int, density: int = 1) -> list[int]:
    """Return grid positions in (start, end] that a prefill may keep as cheap candidates: dense first, then sparser.

    They are the same for every prompt, so that requests with a common prefix agree on them. With a density of n, only
    every n-th is kept.

    >>> candidates(0, 2048, 64)[:3], candidates(0, 2048, 64)[-3:], candidates(0, 512, 64, density=4)
    ([64, 128, 192], [1920, 1984, 2048], [256, 512])
    """
    ladder = _LADDERS.setdefault(cell, [0])
    while ladder[-1] <= end:
        here = ladder[-1]
        ladder.append(here + max(cell, floor_to_grid(int(here * CANDIDATE_SHARE), cell)))
    low, high = bisect_right(ladder, start), bisect_right(ladder, end)
    return ladder[low + -low % density : high : density]


def candidates_at_end(start: int, end: int, prompt: int, cell: int, density: int = 1) -> list[int]:
    """Return grid positions in (start, end] among the last cells of a prompt.

    >>> candidates_at_end(0, 1000, 1000, 64, density=2)
    [512, 640, 768, 896]
    """
    last = repeatable(prompt, cell)
    first = last - CANDIDATES_AT_END * cell
    return [p for p in range(first, last, cell) if start < p <= end and p // cell % density == 0]


_LADDERS: dict[int, list[int]] = {}


def density(unproved: int) -> int:
    """Return n, if every n-th candidate is kept after this many prompts without a hit on their candidates.

    >>> [density(count) for count in (0, 31, 32, 64, 128, 10_000)]
    [1, 1, 2, 4, 8, 8]
    """
    return 1 << min(3, (unproved // UNPROVED).bit_length())
