"""How far a step computes a prompt."""

from __future__ import annotations

from weft.base.grid import floor_to_grid


def even_chunk(left: int, most: int, cell: int) -> int:
    """Return how many of the tokens that are left to compute in a step, if no step may have more than `most`.

    A prompt that departs is cut into chunks of about the same size. What its last chunk computes leaves while later
    layers of that chunk are computed, which takes too short a time if the chunk is what others have left.

    >>> even_chunk(8192, 8192, 64), even_chunk(8256, 8192, 64), even_chunk(64, 8192, 64), even_chunk(100, 7, 64)
    (8192, 4160, 64, 7)
    """
    chunk = -(-left // -(-left // most))
    return min(most, -(-chunk // cell) * cell)


def canonical_end(start: int, budget: int, prompt: int, total: int, cell: int) -> int:
    """Return where a row from `start` ends, so that every token is computed in the form of a lone, cold run.

    A row of a prompt ends on the grid or at the prompt's end; to get there it may exceed the budget by less than a
    cell. If the prompt's last cell has one token, that is a row of its own. Tokens generated before a preemption, from
    `prompt` to `total`, return one at a time, as they came.

    >>> canonical_end(0, 100, 200, 200, 64), canonical_end(128, 100, 200, 200, 64), canonical_end(64, 10, 200, 200, 64)
    (64, 200, 128)
    >>> canonical_end(0, 500, 129, 129, 64), canonical_end(128, 500, 129, 129, 64), canonical_end(150, 9, 150, 200, 64)
    (128, 129, 151)
    """
    if start >= prompt:
        return min(total, start + 1)
    assert start % cell == 0, start
    end = prompt if start + budget >= prompt else max(floor_to_grid(start + budget, cell), start + cell)
    end = min(end, prompt)
    return end - 1 if end == prompt and end % cell == 1 and end > start + 1 else end
