"""A draft model: a second, smaller model that guesses a sequence's next tokens by decoding them greedily.

It has a ledger and a device of its own and uses the seats of the target's planner. For a row of `n` known tokens, one
grant covers the tokens that it has not computed yet and its own guesses:

    [0, computed) is settled   [computed, n) is certain   [n, n + drafts - 1) are guesses, one decode each

The last guess is only sampled. The grant is settled when the target has verified the guesses, so undoing wrong ones
moves a cursor, as in the target. It is a grant of several flights, which all have landed when `draft` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np

from weft.base.grid import floor_to_grid
from weft.base.plan import Captures, Ints, Plan, Sampling
from weft.engine.assembly import drain, page_tables
from weft.engine.device import Device
from weft.engine.sequence import Sequence
from weft.memory.audit import check_plan
from weft.memory.keys import Key
from weft.memory.lease import Grant, Lease
from weft.memory.ledger import Ledger


@dataclass(slots=True)
class Open:
    """A sequence of the target in the draft model's memory. `certain`: where the guesses of its grant begin."""

    sequence: Sequence
    keys: list[Key]
    lease: Lease
    grant: Grant | None = None
    certain: int = 0


@dataclass(frozen=True, slots=True)
class RowPart:
    """A part of a grant that one flight computes: tokens [start, end) of a seat, the first from the board or not."""

    seat: int
    grant: Grant
    start: int
    end: int
    samples: bool
    from_board: bool = False


class DraftModel:
    """`vocab_size` is the smaller one of both models; `tokens_per_step` bounds the known tokens that a call computes.

    `device` executes plans of `ledger`, and has a board of all its seats.
    """

    name = "model"

    def __init__(
        self, ledger: Ledger, device: Device, vocab_size: int, tokens_per_step: int, paranoid: bool = False
    ) -> None:
        self.ledger = ledger
        self.executor = device
        self.vocab_size = vocab_size
        self.tokens_per_step = tokens_per_step
        self.paranoid = paranoid
        self._open: dict[int, Open] = {}
        self._number = 0

    # verbs of the planner -------------------------------------------------------------------------------------------

    def draft(self, rows: Mapping[int, tuple[Sequence, int]]) -> dict[int, tuple[int, ...]]:
        """Return guesses by seat for sequences of which the host knows all tokens, each up to its number.

        A row that is far behind computes known tokens only, and has no guess this time; nor has one without memory. No
        row that is asked for 0 guesses has any.
        """
        left, parts, wanted = self.tokens_per_step, [], {}
        for seat, (sequence, count) in rows.items():
            if left <= 0:
                break
            part = self._grant(seat, sequence, count, left)
            if part is not None:
                parts.append(part)
                left -= part.end - part.start
                if part.samples:
                    wanted[seat] = count
        if not parts:
            return {}
        self.ledger.snapshot([self._open[part.seat].lease for part in parts])
        found = self._decode([self._current(part) for part in parts], wanted)
        for part in parts:
            self.landed(part)
        return {seat: self._in_vocabulary(tokens) for seat, tokens in found.items()}

    def settle(self, seat: int, accepted: int) -> None:
        """Keep the first `accepted` guesses of a seat, and undo the others."""
        row = self._open.get(seat)
        if row is None or row.grant is None:
            return
        end = min(row.certain + accepted, row.grant.end)
        self.name_cells(row, end)
        self.ledger.settle(row.lease, row.grant, end)
        row.grant = None

    def leave(self, seat: int, returns: bool) -> None:
        """Release what a sequence holds. If it returns, a resume point is kept for it."""
        row = self._open.get(seat)
        if row is None:
            return
        self.settle(seat, 0)
        row.lease.returns = returns
        self.ledger.close(row.lease)
        del self._open[seat]

    def follow(self, by_seat: SequenceOf[Sequence | None]) -> None:
        """Read what must not wait until a row drafts; nothing of a model that reads only tokens."""

    def flush(self) -> None:
        """Drop all cached cells that no running sequence uses."""
        self.ledger.cache.clear()

    # what a model reads ---------------------------------------------------------------------------------------------

    def known(self, sequence: Sequence) -> int:
        """Return up to which position the inputs of a sequence are known."""
        return sequence.length

    def readable(self, seat: int, sequence: Sequence, start: int) -> int:
        """Return up to which position a row can be read now."""
        return self.known(sequence)

    def inputs(self, sequence: Sequence, start: int, end: int) -> Ints:
        """Return the tokens that are read at an interval of positions."""
        return sequence.tokens(start, end)

    def keys(self, sequence: Sequence) -> list[Key]:
        """Return the keys of a sequence's cells, in a list that `name_cells` extends."""
        return sequence.keys

    def name_cells(self, row: Open, end: int) -> None:
        """Extend the keys of a row to the cells before a position."""
        row.sequence.name_cells(end // self.ledger.cell)

    # grants ---------------------------------------------------------------------------------------------------------

    def _grant(self, seat: int, sequence: Sequence, count: int, most: int) -> RowPart | None:
        """Return the known tokens of a row to compute, at most `most`, with memory for its guesses; None without."""
        row = self._open.get(seat) or self.sit(seat, sequence)
        if row is None:
            return None
        # Guesses that were not verified, because their row had no room in the target's step.
        self.settle(seat, 0)
        start = int(self.ledger.planned[seat])
        last = self.readable(seat, sequence, start)
        if start >= last or int(self.inputs(sequence, start, last).max()) >= self.vocab_size:
            return None
        end = min(last, start + most)
        if end < last and floor_to_grid(end, self.ledger.cell) > start:
            end = floor_to_grid(end, self.ledger.cell)
        samples = count > 0 and end == self.known(sequence)
        grant = self.ledger.advance(row.lease, end + count - 1 if samples else end, certain=end)
        if grant is None:
            return None
        row.grant, row.certain = grant, end
        return RowPart(seat, grant, start, end, samples)

    def sit(self, seat: int, sequence: Sequence) -> Open | None:
        """Open a lease for a sequence; None if there is no memory for it."""
        keys, prompt = self.keys(sequence), len(sequence.request.prompt)
        lease = self.ledger.open(seat, keys, prompt, self.known(sequence) - 1)
        if lease is None:
            return None
        self._open[seat] = Open(sequence, keys, lease)
        return self._open[seat]

    def landed(self, part: RowPart) -> None:
        """Settle a part of a row that has no guesses; one with guesses is settled when they are verified."""
        if not part.samples:
            self.settle(part.seat, 0)

    def _current(self, part: RowPart) -> RowPart:
        """Return a part with its grant after snapshots were added to it."""
        row = self._open[part.seat]
        row.grant = row.lease.pending[-1]
        return replace(part, grant=row.grant)

    # flights --------------------------------------------------------------------------------------------------------

    def _decode(self, parts: list[RowPart], wanted: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        """Compute the known tokens of all rows, then guess by guess. All flights are launched before one lands."""
        flights = [self._launch(parts)]
        guessing = {part.seat: part for part in parts if part.samples}
        for number in range(1, max(wanted.values(), default=1)):
            parts = [
                replace(part, start=part.end + number - 1, end=part.end + number, from_board=True)
                for seat, part in guessing.items()
                if wanted[seat] > number
            ]
            flights.append(self._launch(parts))
        found: dict[int, list[int]] = {}
        for seats, flight in flights:
            for seat, token in zip(seats, self.executor.land(flight).tokens.tolist(), strict=True):
                found.setdefault(seat, []).append(token)
        return {seat: tuple(tokens) for seat, tokens in found.items()}

    def _launch(self, parts: list[RowPart]) -> tuple[list[int], object]:
        """Launch the plan of some parts, and return the seats that sample, in order, and its flight."""
        self._number += 1
        # Rows of one token come first.
        parts = sorted(parts, key=lambda part: part.end - part.start > 1)
        plan = self._plan(parts)
        if self.paranoid:
            check_plan(plan, self.ledger)
        return [part.seat for part in parts if part.samples], self.executor.launch(plan)

    def _plan(self, parts: list[RowPart]) -> Plan:
        seats, start, end = (
            np.array([getattr(part, name) for part in parts], np.int64) for name in ("seat", "start", "end")
        )
        sampled = np.flatnonzero([part.samples for part in parts]).astype(np.int32)
        page_table, window_table, window_first = page_tables(self.ledger, seats, start, end)
        none = np.zeros(0, np.int32)
        return Plan(
            number=self._number,
            seat=seats.astype(np.int32),
            start=start.astype(np.int32),
            end=end.astype(np.int32),
            tokens=np.concatenate([self._tokens(part) for part in parts]),
            from_board=np.array([part.from_board for part in parts], np.int32),
            read_slot=np.array([self._slot_before(part) for part in parts], np.int32),
            tail=self.ledger.tail[seats],
            page_table=page_table,
            window_table=window_table,
            window_first=window_first,
            captures=_captures(parts),
            sampled=sampled,
            sampling=Sampling.greedy(len(sampled)),
            score_index=none,
            score_token=none,
            score_top=0,
            poison=drain(self.ledger.arena.freed),
        )

    def _tokens(self, part: RowPart) -> Ints:
        if part.from_board:
            return np.zeros(1, np.int32)
        return self.inputs(self._open[part.seat].sequence, part.start, part.end)

    def _slot_before(self, part: RowPart) -> int:
        """Return the checkpoint at the grid position at or before the part: the grant's, or one that it writes."""
        here = floor_to_grid(part.start, self.ledger.cell)
        written = (c.slot for c in part.grant.captures if c.own and c.position == here)
        return next(written, part.grant.read_slot) or 0

    def _in_vocabulary(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return guesses up to the first one that only the draft model knows."""
        unknown = (place for place, token in enumerate(tokens) if token >= self.vocab_size)
        return tokens[: next(unknown, len(tokens))]


def _captures(parts: list[RowPart]) -> Captures:
    found = [
        (row, capture.position, capture.slot)
        for row, part in enumerate(parts)
        for capture in part.grant.captures
        if capture.slot is not None and part.start < capture.position <= part.end
    ]
    table = np.array(found, np.int32).reshape(-1, 3)
    return Captures(*(np.ascontiguousarray(table[:, column]) for column in range(3)))
