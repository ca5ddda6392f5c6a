"""The absolute grid: cells of 64 tokens, anchored at position 0 of every sequence.

Everything that is cached, captured or resumed lies on this grid. Functions take the cell length as a parameter, so that
tests can run the same code with short cells.
"""

CELL = 64


def floor_to_grid(position: int, cell: int = CELL) -> int:
    """Return the last grid position at or before `position`.

    >>> floor_to_grid(63), floor_to_grid(64), floor_to_grid(130)
    (0, 64, 128)
    """
    return position - position % cell


def cells_covering(length: int, cell: int = CELL) -> int:
    """Return how many cells `length` tokens touch.

    >>> cells_covering(0), cells_covering(1), cells_covering(64), cells_covering(65)
    (0, 1, 1, 2)
    """
    return -(-length // cell)


def first_window_cell(start: int, window: int, cell: int = CELL) -> int:
    """Return the first cell that a query at `start` sees through a sliding window of `window` tokens (itself included).

    >>> first_window_cell(200, 64), first_window_cell(10, 64), first_window_cell(128, 65)
    (2, 0, 1)
    """
    return max(0, start - window + 1) // cell
