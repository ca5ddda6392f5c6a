"""Where the hidden states that an MTP head has not read yet are kept: a line for each position of a seat.

The lines lie as follows; only the device has what is in them:

    blocks of positions, each of one seat   the head's own last output, by seat   padding
"""

from __future__ import annotations

import numpy as np

from weft.base.grid import cells_covering
from weft.base.parts import ranges
from weft.base.plan import Ints, Longs, Plan

# Positions of a block, and blocks that a seat needs while its states wait to be read many at once.
BLOCK = 16
BLOCKS_OF_A_SEAT = 6


class StateLines:
    """A seat keeps one interval of positions, [first, end), if it keeps any.

    What a step writes replaces everything from its first position on, so states of wrong drafts are gone when the next
    step writes. Beyond `most` positions, or without a free block, a seat loses all of them. A row that follows drafts
    in flight has lines for the positions of its plan, until `move` says where it started.
    """

    def __init__(self, seats: int, most: int) -> None:
        blocks = block_count(seats, most)
        self.most, self.own = most, blocks * BLOCK
        self.padding = self.own + seats
        self.first = np.zeros(seats, np.int64)
        self.end = np.zeros(seats, np.int64)
        # By seat: whether its states are kept at all.
        self.kept_for = np.zeros(seats, np.bool_)
        # By seat: the end of the last block that it holds, and its blocks by their number in the sequence, in a ring.
        self._limit = np.zeros(seats, np.int64)
        self._blocks = np.zeros((seats, blocks), np.int32)
        self._free = list(range(blocks))
        # By seat: how many positions lower its blocks are numbered than when they were written.
        self._moved = np.zeros(seats, np.int64)

    def place(self, plan: Plan) -> Ints:
        """Keep the states of a step's tokens from now on, and return the line of each. Others have that of padding."""
        kept = self.kept_for[plan.seat]
        if not kept.all():
            every = np.full(len(plan.tokens), self.padding, np.int32)
            own = np.repeat(kept, plan.end - plan.start)
            every[own] = self._place(plan.seat[kept], plan.start[kept], plan.end[kept])
            return every
        return self._place(plan.seat, plan.start, plan.end)

    def _place(self, *rows: Ints) -> Ints:
        seat, start, end = (each.astype(np.int64) for each in rows)
        for row in np.flatnonzero((start > self.end[seat]) | (start < self.first[seat])).tolist():
            self.forget(int(seat[row]))
            self._begin(int(seat[row]), int(start[row]))
        self.end[seat] = end
        beyond = end + self._moved[seat] > self._limit[seat]
        full = [row for row in np.flatnonzero(beyond).tolist() if not self._grow(int(seat[row]))]
        positions, owners = ranges(start, end - start)
        lines = self._find(seat[owners], positions)
        if full:
            lines[np.isin(owners, full)] = self.padding
        return lines

    def find(self, plan: Plan) -> Ints:
        """Return the lines that a head reads for a step: of its own output if a row's token is on the board."""
        seat, start, end = (each.astype(np.int64) for each in (plan.seat, plan.start, plan.end))
        own = plan.from_board > 0
        kept = (self.first[seat] <= start) & (end <= self.end[seat])
        assert (own | kept).all(), "a head reads states that were not kept"
        positions, owners = ranges(start, end - start)
        return np.where(own[owners], self.own + seat[owners], self._find(seat[owners], positions)).astype(np.int32)

    def drop(self, seats: Longs, before: Longs) -> None:
        """Drop the states before positions of seats: the head has read them, and its entries stand."""
        moved = self._moved[seats]
        ends = np.minimum(before + moved, self._limit[seats])
        passed = ends // BLOCK > (self.first[seats] + moved) // BLOCK
        for seat, end in zip(seats[passed].tolist(), ends[passed].tolist(), strict=True):
            self._release(seat, end)
        self.first[seats] = np.maximum(self.first[seats], before)
        self.end[seats] = np.maximum(self.end[seats], self.first[seats])
        for seat in seats[self._limit[seats] < (self.first[seats] + moved) // BLOCK * BLOCK].tolist():
            self._begin(seat, int(self.first[seat]))

    def move(self, seat: int, refused: int) -> None:
        """Let all positions of a seat be lower by the number of drafts that turned out wrong before them."""
        self.first[seat] -= refused
        self.end[seat] -= refused
        self._moved[seat] += refused

    def forget(self, seat: int) -> None:
        """Drop all states of a seat."""
        self._release(seat, int(self._limit[seat]))
        self.first[seat] = self.end[seat] = self._limit[seat] = self._moved[seat] = 0

    def _begin(self, seat: int, position: int) -> None:
        """Let a seat that holds no block begin at a position."""
        self.first[seat] = self.end[seat] = position
        self._moved[seat] = 0
        self._limit[seat] = position // BLOCK * BLOCK

    def _grow(self, seat: int) -> bool:
        """Take blocks up to the end of a seat's interval; if there is no room, forget all of it."""
        limit, end = int(self._limit[seat]), int(self.end[seat] + self._moved[seat])
        needed = cells_covering(end - limit, BLOCK)
        if needed > len(self._free) or int(self.end[seat] - self.first[seat]) > self.most:
            self.forget(seat)
            return False
        for number in range(limit // BLOCK, limit // BLOCK + needed):
            self._blocks[seat, number % self._blocks.shape[1]] = self._free.pop()
        self._limit[seat] = limit + needed * BLOCK
        return True

    def _release(self, seat: int, end: int) -> None:
        """Release the blocks of a seat that lie before a position, as it was when they were written."""
        first = int(self.first[seat] + self._moved[seat])
        numbers = np.arange(first // BLOCK, end // BLOCK) % self._blocks.shape[1]
        self._free.extend(self._blocks[seat, numbers].tolist())

    def _find(self, seats: Longs, positions: Longs) -> Ints:
        positions = positions + self._moved[seats]
        block = self._blocks[seats, positions // BLOCK % self._blocks.shape[1]]
        found: Ints = (block * BLOCK + positions % BLOCK).astype(np.int32)
        return found


def block_count(seats: int, most: int) -> int:
    return cells_covering(most, BLOCK) + BLOCKS_OF_A_SEAT * seats


def line_count(seats: int, most: int) -> int:
    """Return the number of lines, with those of padding."""
    return block_count(seats, most) * BLOCK + seats + 1
