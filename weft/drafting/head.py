"""An MTP head as a draft model: it reads the target's hidden states besides tokens.

The head's entry at position p combines the target's hidden state at p with token p + 1. So a row of `n` known tokens,
the last of which is not computed yet, has `n - 1` entries, and a cell of entries is named by the tokens one further on.
Its keys and values have a ledger of their own for that reason: the target's cell [0, 64) is complete and shared before
token 64 is known, and sequences that share it may differ there.

    hidden states   h0  h1  h2  ...  h[n-2]
    tokens          x1  x2  x3  ...  x[n-1]   draft 1, draft 2, ...

Entries of drafts are made of the head's own output. They are undone at once, also if the draft is right: then the
target has computed the hidden state that belongs there.

With `k` drafts of a row in flight, the head reads what the flight leaves on the device: a hidden state and a chosen
token for each of them, and one more. Its row has `k + 1` tokens and ends where the first wrong draft is, which the host
learns at the landing; then it is settled.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import numpy as np

from weft.base.plan import Ints, Longs
from weft.drafting.interfaces import DraftedSequence
from weft.drafting.model import DecodedDrafts, DraftModel, KnownRows, Open
from weft.drafting.policy.choosing import RowDrafts
from weft.drafting.state_lines import StateLines
from weft.memory.keys import Key, PrefixIdentity

# Positions that wait for the head before it reads them without being asked for drafts: it then computes many at once.
# If it is hardly ever right, nothing but readings can show that it is again, and answers may be short.
FOLLOWED_AT_ONCE, FOLLOWED_IF_HOPELESS = 64, 32
# If all are shorter than that, it reads this many after this number of steps without a reading.
FOLLOWED_RARELY, RARELY = 8, 256
# Rows in which it then drafts all the same, to learn whether it is right: more would cost memory for their logits.
JUDGED = 32
# Drafts are chosen among the frequent tokens as long as others are less than this share of about this many tokens.
# Reading the whole output head takes a sixth of a step of Qwen3.5-9B, and with an eighth of the tokens out of reach,
# three drafts of which 0.81 are right become 0.71: 14 % fewer tokens.
RARE_SHARE, RARE_MEMORY = 1 / 8, 64


class DraftHead(DraftModel):
    """Reads hidden states as they come, so that few are kept. Without those of its next position, a row has no drafts.

    They are missing after a hit of the target that is deeper than the head's own. Such a row leaves the head:
    its states are not kept, nor has it entries here.
    """

    name = "mtp"
    drafts_stay_on_device = True

    def __init__(self, hidden: StateLines, *args: Any, frequent_tokens: int | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.hidden = hidden
        # How many of the first tokens are frequent, all if that is the vocabulary, and the share of others lately.
        self.frequent_tokens = self.vocab_size if frequent_tokens is None else frequent_tokens
        self._rare = 0.0
        # Sequences with the number of their tokens when they were read last, by seat, and the drafts of what follows.
        self._unjudged: tuple[dict[int, tuple[DraftedSequence, int]], DecodedDrafts] | None = None
        # The seat from which on rows are judged next, and the steps since the last reading.
        self._judged_next = self._unread_steps = 0
        # By seat: drafts in flight when it was called last.
        self._unverified_before = np.zeros(len(self.ledger.planned), np.int64)

    def known(self, sequence: DraftedSequence) -> int:
        return sequence.length - 1

    def inputs(self, sequence: DraftedSequence, start: int, end: int) -> Ints:
        return sequence.tokens(start + 1, end + 1)

    def keys(self, sequence: DraftedSequence) -> list[Key]:
        return self._identity(sequence).keys(sequence.request.prompt[1:])

    def _identity(self, sequence: DraftedSequence) -> PrefixIdentity:
        """Return the identity of a sequence's entries here. All of them depend on the first token."""
        return replace(sequence.identity, before=sequence.tokens(0, 1).tobytes())

    def name_cells(self, row: Open, end: int) -> None:
        first, cells = len(row.keys), end // self.ledger.cell
        if cells > first:
            after = row.keys[-1] if row.keys else None
            tokens = self.inputs(row.sequence, first * self.ledger.cell, cells * self.ledger.cell)
            row.keys.extend(self._identity(row.sequence).keys(tokens, after))

    def follow(self, by_seat: SequenceOf[DraftedSequence | None]) -> None:
        """Read hidden states once enough have piled up in a row: those of prompts, and of rows that do not draft. All
        rows are then read together, and drafts after some of them show whether the head is right, without drafts.
        """
        self.judge()
        self._unread_steps += 1
        waiting = self.hidden.end - self.hidden.first
        least = self._followed_at_once(by_seat[int(waiting.argmax())])
        if int(waiting.max()) < least:
            return
        rows, most, judged = dict[int, tuple[DraftedSequence, int]](), 0, 0
        seats = np.flatnonzero(waiting)
        for seat in np.roll(seats, -int(np.searchsorted(seats, self._judged_next))).tolist():
            sequence = by_seat[seat]
            assert sequence is not None, "states of an empty seat"
            end, known = int(self.hidden.end[seat]), self.known(sequence)
            readable = min(end, known) - int(self.hidden.first[seat])
            if readable > 0:
                # Where drafts are in flight, the board has what they chose.
                drafts = self._unjudged is None and judged < JUDGED and end <= known + 1
                rows[seat], most, judged = (sequence, int(drafts)), max(most, readable), judged + drafts
        if most < least:
            return
        self._unread_steps = 0
        if (found := self.begin(rows)) is not None:
            self._unjudged = {seat: (rows[seat][0], rows[seat][0].length) for seat in found.counts}, found
            self._judged_next = list(found.counts)[-1] + 1

    def _followed_at_once(self, sequence: DraftedSequence | None) -> int:
        if sequence is None or sequence.drafting is None or not sequence.drafting.is_hopeless:
            return FOLLOWED_AT_ONCE
        return FOLLOWED_IF_HOPELESS if self._unread_steps < RARELY else FOLLOWED_RARELY

    def judge(self) -> None:
        """Learn from the drafts of the last reading, once a step that was launched after it has landed."""
        if self._unjudged is None:
            return
        rows, decoded = self._unjudged
        if not any(sequence.length > place + 1 for sequence, place in rows.values()):
            if all(sequence.lease is None for sequence, _ in rows.values()):
                # All have ended, or wait to continue.
                self._unjudged = None
            return
        self._unjudged = None
        for seat, (draft,) in decoded.tokens().items():
            sequence, place = rows[seat]
            if sequence.drafting is not None and sequence.length > place:
                right = sequence.tokens(place, place + 1)[0] == draft
                sequence.drafting.learn(RowDrafts(self.name, self.name, (draft,), (1.0,)), int(right))

    def readable(self, seats: Longs, start: Longs, known: Longs) -> Longs:
        lost = self.hidden.first[seats] > start
        for seat in seats[lost].tolist():
            self.abandon(seat, self._open[seat].sequence)
        self.hidden.drop(seats[~lost], start[~lost])
        return np.where(lost, start, np.minimum(self.hidden.end[seats], known))

    def expect(self, seat: int, drafts: bool) -> None:
        self.hidden.kept_for[seat] = drafts

    def begin(
        self, asked: Mapping[int, tuple[DraftedSequence, int]], unverified: Mapping[int, int] | None = None
    ) -> DecodedDrafts | None:
        if self.frequent_tokens < self.vocab_size and asked:
            # The last token of each row that the host knows.
            rare = sum(int(s.tokens(s.length - 1, s.length)[0]) >= self.frequent_tokens for s, _ in asked.values())
            self._rare += (rare - self._rare * len(asked)) / (len(asked) + RARE_MEMORY)
            self.frequent = self._rare < RARE_SHARE
        return super().begin(asked, unverified)

    def _rows(
        self,
        seats: SequenceOf[int],
        asked: Mapping[int, tuple[DraftedSequence, int]],
        unverified: Mapping[int, int] | None,
    ) -> KnownRows | None:
        if unverified is None:
            return self._known_rows(list(seats), asked)
        seat, inside = np.array(seats, np.int64), np.array([unverified[each] for each in seats], np.int64)
        known = np.array([self.known(asked[each][0]) for each in seats], np.int64)
        drafts = np.array([asked[each][1] for each in seats], np.int64)
        end = known + inside + 1
        # The flight writes the states that follow the last entry. Otherwise the row waits for its landing.
        there = (self.ledger.planned[seat] == known) & (self.hidden.first[seat] == known)
        there &= self.hidden.end[seat] == end
        tokens = np.zeros(int((inside + 1).sum()), np.int32)
        rows = KnownRows(seat, known, end, drafts, tokens, inside).choose(there)
        count = len(rows.seat)
        if not count or self._builds_on_flight is None:
            return None
        return rows if self._builds_on_flight(0, count, len(rows.tokens)) else None

    def launched(self, rows: KnownRows) -> None:
        """Undo all drafts. Rows with drafts in flight are settled at their next call, when their tokens are known."""
        self._unverified_before[rows.seat] = rows.unverified
        for seat in rows.seat[rows.unverified == 0].tolist():
            self.settle(seat, 0)
        self.hidden.drop(rows.seat, rows.end)

    def verified(self, seat: int, drafter: str, accepted: int) -> None:
        """Take note of where a row ends, and let hidden states after it have the positions where they really are."""
        if self._unverified_before[seat]:
            self._right[seat] = accepted
            self.hidden.move(seat, int(self._unverified_before[seat]) - accepted)
            self._unverified_before[seat] = 0

    def kept(self, row: Open, accepted: int) -> int:
        # Some of the tokens are not known if the sequence was aborted.
        return min(super().kept(row, accepted), self.known(row.sequence))

    def leave(self, seat: int, returns: bool) -> None:
        super().leave(seat, returns)
        self.hidden.forget(seat)
        self.hidden.kept_for[seat], self._unverified_before[seat] = False, 0
