"""Which parts of a file are computed again to verify it, and the requests that do so."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from weft.base.sampling import SamplingParams
from weft.engine.request import Request
from weft.memory.saved.file import Tokens

SALT_BYTES = 32
# A file without resume points is cut into this many stretches at most.
MOST_STRETCHES = 64


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens [start, end) on the grid. A sequence can start at `start`, and is compared from there to `end`."""

    start: int
    end: int


def stretches(cells: int, cell: int, points: Sequence[int]) -> list[Stretch]:
    """Return the stretches of a file: from one resume point to the next, and the rest; all cells belong to one.

    >>> [(each.start, each.end) for each in stretches(5, 64, [128, 192])]
    [(0, 128), (128, 192), (192, 320)]
    >>> [(each.start, each.end) for each in stretches(3, 64, [])]
    [(0, 64), (64, 128), (128, 192)]
    """
    every = cell * -(-cells // MOST_STRETCHES)
    ends = sorted(points) if points else list(range(every, cells * cell, every))
    if not ends or ends[-1] < cells * cell:
        ends.append(cells * cell)
    return [Stretch(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def chosen_stretches(cells: int, cell: int, points: Sequence[int], share: float) -> list[Stretch]:
    """Return a random share of the stretches, of at least one, so that no writer of a file knows which."""
    found = stretches(cells, cell, points)
    count = min(len(found), math.ceil(share * len(found)))
    return secrets.SystemRandom().sample(found, count)


def request_of(tokens: Tokens, prompt: int, stretch: Stretch) -> Request:
    """Return a request that computes the tokens up to the end of a stretch, under a salt that no other one has."""
    answered = tokens[prompt : stretch.end] if stretch.end > prompt else None
    return Request(
        tokens[: min(prompt, stretch.end)],
        SamplingParams(max_tokens=0),
        salt=secrets.token_bytes(SALT_BYTES),
        answered=answered,
    )
