"""A draft model: a second, smaller model that drafts a sequence's next tokens by decoding them greedily.

It has a ledger and a device of its own and uses the seats of the target's planner. For a row of `n` known tokens, one
call covers the tokens that it has not computed yet and its own drafts:

    [0, computed) is settled   [computed, n) is certain   [n, n + drafts - 1) are drafts, one decode each

The last draft is only sampled. The row is settled when the target has verified the drafts, so undoing wrong ones moves
a cursor, as in the target. Rows that stay inside their cell need no grant, as in the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.base.grid import floor_to_grid
from weft.base.plan import NO_DRAFTS, Ints, Longs, Sampling, StepDrafts
from weft.drafting.interfaces import DraftedSequence, DraftingDevice
from weft.memory.audit import check_plan
from weft.memory.keys import Key
from weft.memory.lease import Grant, Lease
from weft.memory.ledger import Ledger
from weft.memory.plans import build_plan

FREQUENT_ONLY = StepDrafts(frequent_only=True)


@dataclass(slots=True)
class Open:
    """A sequence of the target in the draft model's memory. `grant` is that of a call that leaves a cell."""

    sequence: DraftedSequence
    keys: list[Key]
    lease: Lease
    grant: Grant | None = None


@dataclass(frozen=True, slots=True)
class KnownRows:
    """The rows of a call: each computes its tokens [start, end), then decodes some drafts."""

    seat: Longs
    start: Longs
    end: Longs
    drafts: Longs  # 0: known tokens only
    tokens: Ints  # of all rows, packed
    # Drafts in flight. With some, a row's tokens are those that the flight chooses: the device ends it where they do.
    unverified: Longs

    def choose(self, rows: NDArray[np.bool_]) -> KnownRows:
        kept = np.repeat(rows, self.end - self.start)
        tokens, unverified = self.tokens[kept], self.unverified[rows]
        return KnownRows(self.seat[rows], self.start[rows], self.end[rows], self.drafts[rows], tokens, unverified)


class DecodedDrafts:
    """Drafts of a call, by the number that each seat has. They need not have landed."""

    def __init__(self, counts: dict[int, int], land: Callable[[], dict[int, tuple[int, ...]]]) -> None:
        self.counts = counts
        self._land = land
        self._tokens: dict[int, tuple[int, ...]] | None = None

    def tokens(self) -> dict[int, tuple[int, ...]]:
        """Return the drafts by seat. Waits for their landing."""
        if self._tokens is None:
            self._tokens = self._land()
        return self._tokens


class DraftModel:
    """`vocab_size` is the smaller one of both models; `tokens_per_step` bounds the known tokens that a call computes.

    `device` executes plans of `ledger`, and has a board of all its seats.
    """

    name = "model"
    # Whether the target can read drafts on the device, and they can follow drafts in flight.
    drafts_stay_on_device = False
    # Whether drafts of the present call are chosen among the frequent tokens only.
    frequent = False

    def __init__(
        self, ledger: Ledger, device: DraftingDevice, vocab_size: int, tokens_per_step: int, paranoid: bool = False
    ) -> None:
        self.ledger = ledger
        self.executor = device
        self._builds_on_flight = device.capabilities.builds_on_flight
        self.vocab_size = vocab_size
        self.tokens_per_step = tokens_per_step
        self.paranoid = paranoid
        self._open: dict[int, Open] = {}
        # By seat: where the drafts of its last call begin, and whether that call is not settled yet.
        self._certain = np.zeros(len(ledger.planned), np.int64)
        self._unsettled = np.zeros(len(ledger.planned), np.bool_)
        # By seat: how many tokens after the certain ones are right, as far as is known.
        self._right = np.zeros(len(ledger.planned), np.int64)
        self._number = 0

    # verbs of the planner -------------------------------------------------------------------------------------------

    def draft(self, asked: Mapping[int, tuple[DraftedSequence, int]]) -> dict[int, tuple[int, ...]]:
        """Return drafts by seat for sequences of which the host knows all tokens, each up to its number.

        A row that is far behind computes known tokens only, and has no drafts this time; nor has one without memory. No
        row that is asked for 0 drafts has any.
        """
        found = self.begin(asked)
        return {} if found is None else {seat: self._in_vocabulary(tokens) for seat, tokens in found.tokens().items()}

    def begin(
        self, asked: Mapping[int, tuple[DraftedSequence, int]], unverified: Mapping[int, int] | None = None
    ) -> DecodedDrafts | None:
        """Launch what `draft` returns. With `unverified` drafts in flight, by seat, draft what follows them."""
        seats = [seat for seat, (sequence, _) in asked.items() if seat in self._open or self.sit(seat, sequence)]
        for seat in seats:
            # If they were not verified, because their row had no room in the target's step, no draft is right.
            self.settle(seat, int(self._right[seat]))
        rows = self._rows(seats, asked, unverified) if seats else None
        rows = None if rows is None else self._advance(rows)
        if rows is None:
            return None
        found = self._decode(rows)
        self.launched(rows)
        return found

    def expect(self, seat: int, drafts: bool) -> None:
        """Take note of whether the sequence that sits down in a seat may ask for drafts."""

    def abandon(self, seat: int, sequence: DraftedSequence) -> None:
        """Release what a running sequence holds. It has no drafts any more, also if it is preempted and returns."""
        if sequence.drafting is not None:
            sequence.drafting.leave_model()
        self.leave(seat, returns=False)

    def verified(self, seat: int, drafter: str, accepted: int) -> None:
        """Take note of how many drafts of a seat were right."""
        if drafter == self.name:
            self.settle(seat, accepted)

    def settle(self, seat: int, accepted: int) -> None:
        """Keep the first `accepted` drafts of a seat, and undo the others."""
        if not self._unsettled[seat]:
            return
        self._unsettled[seat] = False
        row, ledger = self._open[seat], self.ledger
        end = min(self.kept(row, accepted), int(ledger.planned[seat]))
        if row.grant is not None:
            self.name_cells(row, end)
        ledger.settle(row.lease, row.grant, end)
        row.grant = None

    def leave(self, seat: int, returns: bool) -> None:
        """Release what a sequence holds. If it returns, a resume point is kept for it."""
        row = self._open.get(seat)
        if row is None:
            return
        self.settle(seat, int(self._right[seat]))
        self.ledger.close(row.lease, returns)
        del self._open[seat]

    def follow(self, by_seat: SequenceOf[DraftedSequence | None]) -> None:
        """Read what must not wait until a row drafts; nothing of a model that reads only tokens."""

    def flush(self) -> None:
        """Drop all cached cells that no running sequence uses."""
        self.ledger.clear()

    # what a model reads ---------------------------------------------------------------------------------------------

    def known(self, sequence: DraftedSequence) -> int:
        """Return up to which position the inputs of a sequence are known."""
        return sequence.length

    def readable(self, seats: Longs, start: Longs, known: Longs) -> Longs:
        """Return up to which position rows can be read now, if their inputs from `start` to `known` are known."""
        return known

    def inputs(self, sequence: DraftedSequence, start: int, end: int) -> Ints:
        """Return the tokens that are read at an interval of positions."""
        return sequence.tokens(start, end)

    def keys(self, sequence: DraftedSequence) -> list[Key]:
        """Return the keys of a sequence's cells, in a list that `name_cells` extends."""
        return sequence.keys

    def name_cells(self, row: Open, end: int) -> None:
        """Extend the keys of a row to the cells before a position."""
        row.sequence.name_cells(end // self.ledger.cell)

    def kept(self, row: Open, accepted: int) -> int:
        """Return where a row ends of which `accepted` drafts were accepted."""
        return int(self._certain[row.lease.seat]) + accepted

    def launched(self, rows: KnownRows) -> None:
        """Settle rows without drafts; those with drafts are settled when they are verified."""
        for seat in rows.seat[rows.drafts == 0].tolist():
            self.settle(seat, 0)

    # rows -----------------------------------------------------------------------------------------------------------

    def sit(self, seat: int, sequence: DraftedSequence) -> Open | None:
        """Open a lease for a sequence; None if there is no memory for it."""
        keys, prompt = self.keys(sequence), len(sequence.request.prompt)
        lease = self.ledger.open(seat, keys, prompt, self.known(sequence) - 1)
        if lease is None:
            return None
        self._open[seat] = Open(sequence, keys, lease)
        return self._open[seat]

    def _rows(
        self, seats: list[int], asked: Mapping[int, tuple[DraftedSequence, int]], unverified: Mapping[int, int] | None
    ) -> KnownRows | None:
        """Return the rows of a call, if there are any."""
        return self._known_rows(seats, asked) if unverified is None else None

    def _known_rows(self, seats: list[int], asked: Mapping[int, tuple[DraftedSequence, int]]) -> KnownRows | None:
        """Return the known tokens of rows that are to be computed now, if there are any."""
        seat = np.array(seats, np.int64)
        known = np.array([self.known(asked[each][0]) for each in seats], np.int64)
        drafts = np.array([asked[each][1] for each in seats], np.int64)
        start = self.ledger.planned[seat]
        end = self._bound(start, self.readable(seat, start, known))
        behind = np.flatnonzero(end > start)
        if not len(behind):
            return None
        spans = zip(behind.tolist(), start[behind].tolist(), end[behind].tolist(), strict=True)
        tokens = [self.inputs(asked[seats[row]][0], first, last) for row, first, last in spans]
        drafts = np.where(end == known, drafts, 0)
        packed, none = np.concatenate(tokens), np.zeros(len(behind), np.int64)
        rows = KnownRows(seat[behind], start[behind], end[behind], drafts[behind], packed, none)
        if int(rows.tokens.max()) < self.vocab_size:
            return rows
        familiar = np.array([int(each.max()) < self.vocab_size for each in tokens])
        return rows.choose(familiar) if familiar.any() else None

    def _bound(self, start: Longs, last: Longs) -> Longs:
        """Return where rows end that have at most `tokens_per_step` tokens together. Parts of a row end on the grid."""
        left, cell = self.tokens_per_step, self.ledger.cell
        if int(np.maximum(last - start, 0).sum()) <= left:
            return last
        ends = last.copy()
        for row, (first, end) in enumerate(zip(start.tolist(), last.tolist(), strict=True)):
            if end - first > left:
                end = first + left
                end = floor_to_grid(end, cell) if floor_to_grid(end, cell) > first else end
            ends[row] = end
            left -= max(0, end - first)
        return ends

    def _advance(self, rows: KnownRows) -> KnownRows | None:
        """Allocate memory for rows and their drafts. Return those that have it, if there are any."""
        ledger = self.ledger
        tokens = rows.end - rows.start + np.maximum(rows.drafts - 1, 0)
        needy = ledger.needs_grant(rows.seat, tokens)
        ledger.advance_each(rows.seat[~needy], tokens[~needy])
        granted = []
        for row in np.flatnonzero(needy).tolist():
            opened = self._open[int(rows.seat[row])]
            start, certain = int(rows.start[row]), int(rows.end[row] - rows.unverified[row])
            opened.grant = ledger.advance(opened.lease, start + int(tokens[row]), certain=certain)
            if opened.grant is not None:
                needy[row] = False
                granted.append(opened)
        grants = ledger.snapshot([each.lease for each in granted])
        for each in granted:
            each.grant = grants[each.lease.seat]
        if needy.any():
            rows = rows.choose(~needy)
        self._certain[rows.seat], self._unsettled[rows.seat] = rows.end - rows.unverified, True
        self._right[rows.seat] = 0
        return rows if len(rows.seat) else None

    # flights --------------------------------------------------------------------------------------------------------

    def _decode(self, rows: KnownRows) -> DecodedDrafts | None:
        """Compute the known tokens of all rows, then draft by draft. None lands here."""
        # Rows of one token come first.
        order = np.argsort(rows.end - rows.start > 1, kind="stable")
        samples = rows.drafts[order] > 0
        known = (rows.seat[order], rows.start[order], rows.end[order], rows.unverified[order])
        flights = [self.launch(*known, _packed(rows, order), samples)]
        if not samples.any():
            return None
        drafting = [order[samples]]
        for number in range(1, int(rows.drafts.max())):
            some = np.flatnonzero(rows.drafts > number)
            start = rows.end[some] + number - 1
            every = np.ones(len(some), np.bool_)
            flights.append(self.launch(rows.seat[some], start, start + 1, rows.unverified[some], None, every))
            drafting.append(some)

        def land() -> dict[int, tuple[int, ...]]:
            tokens = np.zeros((len(rows.seat), len(flights)), np.int64)
            for number, (some, flight) in enumerate(zip(drafting, flights, strict=True)):
                tokens[some, number] = self.executor.land(flight).tokens
            found = zip(rows.seat.tolist(), rows.drafts.tolist(), tokens.tolist(), strict=True)
            return {seat: tuple(drafts[:count]) for seat, count, drafts in found if count}

        counts = zip(rows.seat.tolist(), rows.drafts.tolist(), strict=True)
        return DecodedDrafts({seat: count for seat, count in counts if count}, land)

    def launch(
        self, seat: Longs, start: Longs, end: Longs, unverified: Longs, tokens: Ints | None, samples: NDArray[np.bool_]
    ) -> object:
        """Launch tokens [start, end) of seats; without `tokens`, the one of each row is on the board."""
        self._number += 1
        counts, on_board = unverified.astype(np.int32), tokens is None
        spans = enumerate(zip(seat.tolist(), start.tolist(), end.tolist(), strict=True))
        grants = {row: grant.part(*span) for row, (each, *span) in spans if (grant := self._open[each].grant)}
        sampled = np.flatnonzero(samples).astype(np.int32)
        plan = build_plan(
            self.ledger,
            self._number,
            (seat, start, end),
            np.zeros(len(seat), np.int32) if tokens is None else tokens,
            np.full(len(seat), on_board, np.int32),
            grants,
            sampled,
            Sampling.greedy(len(sampled)),
            self._step_drafts(counts, on_board),
        )
        if self.paranoid:
            check_plan(plan, self.ledger)
        return self.executor.launch(plan)

    def _step_drafts(self, unverified: Ints, on_board: bool) -> StepDrafts:
        """Return which rows start, or end, earlier if drafts in flight are rejected."""
        if not unverified.any():
            return FREQUENT_ONLY if self.frequent else NO_DRAFTS
        if on_board:
            moved = {"unverified_before": unverified, "earlier_slot": np.zeros_like(unverified)}
        else:
            moved = {
                "unverified_inside": unverified,
                "on_device": np.where(unverified > 0, unverified + 1, 0).astype(np.int32),
            }
        return StepDrafts(**moved, frequent_only=self.frequent)

    def _in_vocabulary(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return drafts up to the first one that only the draft model knows."""
        if max(tokens) < self.vocab_size:
            return tokens
        return tokens[: next(place for place, token in enumerate(tokens) if token >= self.vocab_size)]


def _packed(rows: KnownRows, order: Longs) -> Ints:
    """Return the tokens of rows in another order."""
    length = rows.end - rows.start
    first = (np.cumsum(length) - length)[order]
    length = length[order]
    before = np.cumsum(length) - length
    packed: Ints = rows.tokens[np.arange(len(rows.tokens)) + np.repeat(first - before, length)]
    return packed
