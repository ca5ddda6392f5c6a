"""Which rows of a step have drafts, and which wait for a landing to have some.

A row costs nothing while its drafts do not pay: it sleeps for a number of steps in which it is not asked for drafts,
and its steps are planned as if there were none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import inf
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from weft.drafting.interfaces import DraftedSequence, LookAheadBudget, SeatFacts
from weft.drafting.model import DecodedDrafts, DraftModel
from weft.drafting.policy.choosing import Drafting, RowDrafts, SequenceDrafts

Drafted = TypeVar("Drafted", bound=DraftedSequence)

# Share of the decoding rows that must have drafted for the next step to wait for their results.
LAND_FIRST_SHARE = 0.25
# Tokens of all histories that one row with penalties brings into a step: each of its samples has one of its own.
MOST_HISTORY = 1 << 14
NEVER = 1 << 62
# Questions without any draft, since drafts were last right, after which a row is asked half as often, and the most
# steps between two of them.
FRUITLESS, RAREST_QUESTION = 2, 4
# What rows may spend on searching texts for drafts if they found none the last time: a share of a step, or of the time
# that the host waits for the device anyway, whichever is more. One searches now and then in any case, and twice as many
# as just found drafts.
SEARCHING, SEARCHING_WHILE_WAITING = 0.01, 0.5
SEARCH_SECONDS = 60e-6
# Steps after which it is reckoned again how many rows may search.
RECKON_AFTER = 8
# Weight of a new step in the mean time that the host waits, and how far a wait may exceed that mean: a pause of the
# whole machine is none.
NEW_WAIT, MOST_NEWS = 0.1, 2
LEAST_WAIT_SECONDS = 20e-6
# Drafts by habit of all rows of a step: each takes the host as long as a mask. With more rows of grammars
# there are none.
MOST_HABIT_DRAFTS = 32
# Rows and drafts of a probe, and the worth of a first draft from which on being right is no news.
PROBED_ROWS, PROBED_DRAFTS = 4, 2
LIKELY = 0.5
# A row without drafts stays awake if its first one is worth this share of the least draft that was chosen: in a larger
# step, or once it is known better, it would be chosen too.
AWAKE = 0.5
# A row that would miss a step gets the draft of another if its own is worth this share of it.
WORTH_MOVING = 0.25


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row that may draft: its sequence, the samples that it may still plan, and what is in flight."""

    sequence: DraftedSequence
    left: int
    # Drafts in flight; None: nothing is.
    unverified: int | None = None
    # Whether the row can draft on top of what is in flight.
    builds_on_flight: bool = False


class DraftRows:
    """Drafting of the planner's seats. Without `drafting`, no seat ever drafts. `model` drafts by decoding."""

    def __init__(
        self,
        drafting: Drafting | None,
        sampling: SeatFacts,
        seats: int,
        model: DraftModel | None = None,
        masks: LookAheadBudget | None = None,
    ) -> None:
        self.drafting = drafting
        self.model = model
        self.masks = masks
        self.sampling = sampling
        # By seat: the first plan in which it may draft, and whether its last token is known to the host and not
        # on the board.
        self._wakes = [NEVER] * seats
        # No seat drafts before this plan: until then, steps are planned as if there were none.
        self.first_wake = NEVER
        self.host_has_token = np.zeros(seats, np.bool_)
        # By seat: how often it had no drafts since some were right.
        self._fruitless: dict[int, int] = {}
        # Seats that had drafts when they were asked last, or need not search for them, and whose turn it is to search.
        self._promising: set[int] = set()
        self._turn = 0
        # Searches that rows may make in a step, when this is reckoned again, and how long the host waits in a step.
        self._affordable, self._reckon_at = 0.0, 0
        self._waits_seconds = 0.0
        # Searches that rows may make by now, and the step up to which they are counted.
        self._searches, self._counted_to = 0.0, 0
        # How many searched and found drafts in the last step. At first, all may.
        self._found = seats
        # The last plan with drafts, and those by seat.
        self._drafted_in = 0
        self._drafted: dict[int, RowDrafts] = {}
        # By seat: how many drafts its last row with drafts had.
        self.drafted = np.zeros(seats, np.int64)
        # Seats that probe next: they waited for a landing to do it, or all drafts of their last row were right against
        # expectation.
        self._waiting: set[int] = set()

    def begin(self, sequence: DraftedSequence) -> SequenceDrafts | None:
        """Return the drafts of a new sequence, if it may have any."""
        drafting, request = self.drafting, sequence.request
        most = request.params.draft
        assert drafting is not None
        if most == 0:
            drafting.counts.not_drafted["request"] += 1
            return None
        return drafting.begin(request.prompt, sequence.identity.root, most, request.prediction, request.grammar)

    def sit(self, seat: int, sequence: DraftedSequence) -> None:
        self._wake(seat, NEVER if sequence.drafting is None else 0)
        if self.model is not None:
            self.model.expect(seat, sequence.drafting is not None and sequence.drafting.model is not None)
        self.host_has_token[seat] = False
        self._waiting.discard(seat)
        self._fruitless.pop(seat, None)
        searches = sequence.drafting is None or sequence.drafting.only_searches
        (self._promising.discard if searches else self._promising.add)(seat)

    def stand_up(self, seat: int, returns: bool) -> None:
        """Release what the draft model holds for a sequence that leaves its seat; `returns`: it was preempted."""
        self._wakes[seat] = NEVER
        self._promising.discard(seat)
        if self.model is not None:
            self.model.leave(seat, returns)

    def awake(self, seats: NDArray[np.int64], number: int) -> list[int]:
        """Return those of these seats that may draft after the plan of this number."""
        drafting = self.drafting
        assert drafting is not None
        if number < self.first_wake:
            return []
        # Without the duration of such a step without drafts, nothing tells whether they pay.
        if not (drafting.possible(len(seats)) and drafting.costs.known(len(seats))):
            return []
        most = self._may_search(len(seats), number)
        if not most and not self._promising:
            return []
        return self._in_turn(seats.tolist(), most, number)

    def note_wait(self, seconds: float) -> None:
        """Note how long the host waited for a landing while the next step was in flight."""
        most = max(LEAST_WAIT_SECONDS, MOST_NEWS * self._waits_seconds)
        self._waits_seconds += NEW_WAIT * (min(seconds, most) - self._waits_seconds)

    def _may_search(self, rows: int, number: int) -> int:
        """Return how many rows may search in a step of `rows` rows. What earlier steps left may be used too."""
        if number >= self._reckon_at:
            self._affordable, self._reckon_at = self._reckoned(rows), number + RECKON_AFTER
        most = max(1.0, RAREST_QUESTION * self._affordable)
        self._searches = min(self._searches + self._affordable * (number - self._counted_to), most)
        self._counted_to = number
        return max(int(self._searches), 2 * self._found)

    def _reckoned(self, rows: int) -> float:
        """Return how many rows may search in each step."""
        assert self.drafting is not None
        seconds = self.drafting.costs.seconds(rows, 0)
        if not seconds:
            return len(self._wakes)
        share = max(SEARCHING * seconds, SEARCHING_WHILE_WAITING * self._waits_seconds)
        return max(1 / RAREST_QUESTION, share / SEARCH_SECONDS)

    def _in_turn(self, seats: list[int], most: int, number: int) -> list[int]:
        """Return the seats that are awake: of those that must search at most this number, in turns."""
        wakes, promising, count = self._wakes, self._promising, len(seats)
        asked = (
            [place for place, seat in enumerate(seats) if seat in promising and wakes[seat] <= number]
            if promising
            else []
        )
        known, first = len(asked), self._turn % max(1, count)
        for place in chain(range(first, count), range(first)):
            if len(asked) - known >= most:
                break
            if wakes[seats[place]] <= number and seats[place] not in promising:
                asked.append(place)
                self._turn = place + 1
        self._searches = max(0.0, self._searches - (len(asked) - known))
        if not asked and most:
            self.first_wake = min(wakes)
        return [seats[place] for place in sorted(asked)]

    def _wake(self, seat: int, number: int) -> None:
        """Let a seat draft from the plan of this number on."""
        self._wakes[seat] = number
        self.first_wake = min(self.first_wake, number)

    def promising(self, sequences: SequenceOf[Drafted], number: int) -> list[Drafted]:
        """Return those of the rows that are awake which may have something to draft, and note the others."""
        assert self.drafting is not None
        shared, found, known = self.drafting.shared, [], len(self._promising)
        for row in sequences:
            if row.drafting is not None and row.drafting.may_draft(row.generated, shared):
                found.append(row)
                self._promising.add(row.seat)
            else:
                self._promising.discard(row.seat)
                self._note_fruitless(row.seat, number)
        self._found = len(self._promising) - known
        if not found:
            self._waiting = set()
            self.first_wake = min(self._wakes)
        return found

    def candidates(
        self,
        sequences: SequenceOf[DraftedSequence],
        left: SequenceOf[int],
        in_flight: NDArray[np.bool_] | None,
        may_build: bool,
    ) -> dict[int, Candidate]:
        """Return rows that may draft, by seat: how many samples each has `left`, and which are `in_flight`, if any
        are. `may_build`: rows of the step may draft on top of what is in flight."""
        if in_flight is None:
            return {row.seat: Candidate(row, count) for row, count in zip(sequences, left, strict=True)}
        seats = [row.seat for row in sequences]
        facts = (in_flight, self.host_has_token[seats], self.drafted[seats], self.sampling.looks_back[seats])
        return {
            row.seat: Candidate(row, count, drafts if host_has_token else 0, may_build and not looks_back)
            if flies
            else Candidate(row, count)
            for row, count, flies, host_has_token, drafts, looks_back in zip(
                sequences, left, *(fact.tolist() for fact in facts), strict=True
            )
        }

    @property
    def can_build_on_flight(self) -> bool:
        """Return whether drafts can follow others in flight. A draft model must know the tokens that it continues."""
        return self.model is None or self.model.drafts_stay_on_device

    def choose(
        self,
        rows: Mapping[int, Candidate],
        count: int,
        room: int,
        number: int,
        idle: bool,
        prompts: bool,
        fits: Callable[[int, int], bool],
    ) -> tuple[dict[int, RowDrafts], set[int]]:
        """Return the drafts of a step by seat, and the seats that wait for their landing to draft after it.

        `number` is that of the last plan, `idle`: nothing is in flight, `prompts`: the step may have some.
        `fits` tells of some rows and their number of drafts whether the device can compute them if they follow others.
        `rows` are the seats that are awake, of `count` that decode. A row whose token is in flight, and which cannot
        follow it, cannot be continued by drafts yet. It waits if enough rows have drafts that the whole step does, or
        if the drafts are likely to gain more than the step that it misses.
        """
        assert self.drafting is not None
        offered = self._offers(rows)
        for seat, row in rows.items():
            # What a grammar forces depends on where it is, not on the steps before.
            if seat not in offered and row.sequence.constraint is None:
                self._note_fruitless(seat, number)
        if not offered:
            self._waiting = set()
            return {}, set()
        all_drafts = list(offered.values())
        lengths = self.drafting.choose(all_drafts, count, room)
        following = [bool(rows[s].unverified) and self._may_have(rows[s], p) for s, p in offered.items()]
        spread(lengths, all_drafts, following)
        probing = set() if any(lengths) else self._probe(offered, number)
        if probing:
            lengths = [min(PROBED_DRAFTS, len(p.worth)) if s in probing else 0 for s, p in offered.items()]
        wanted = {seat: p.first(length) for (seat, p), length in zip(offered.items(), lengths, strict=True) if length}
        together = len(wanted) >= LAND_FIRST_SHARE * count
        blocked = {s: p for s, p in wanted.items() if rows[s].unverified is not None and not self._may_have(rows[s], p)}
        awaiting = {s for s, p in blocked.items() if together or s in probing or sum(p.worth) > 1}
        must_land = {s for s in awaiting if self._needs_landing(s, wanted[s])}
        if prompts or len(must_land) < count:
            # Other rows would wait while these drafts land.
            awaiting -= must_land
        self._waiting = probing & awaiting
        chosen = {seat: row_drafts for seat, row_drafts in wanted.items() if seat not in blocked}
        least = inf if probing else min((p.worth[-1] for p in wanted.values()), default=inf)
        for seat in offered.keys() - chosen.keys() - awaiting:
            # A weak draft in a grammar says nothing about what is forced soon.
            if seat in blocked or (offered[seat].worth[0] < AWAKE * least and not offered[seat].begins_with_habit):
                self._sleep(seat, rows[seat].sequence, number)
        fitting = fits(len(chosen), sum(len(row_drafts.worth) for row_drafts in chosen.values()))
        if not fitting:
            chosen = {seat: row_drafts for seat, row_drafts in chosen.items() if rows[seat].unverified is None}
        return self._decode(chosen, rows, idle and not prompts), awaiting

    def _may_have(self, row: Candidate, row_drafts: RowDrafts) -> bool:
        """Return whether a row may have these drafts while others are in flight. Besides a head, only the head's."""
        return row.builds_on_flight and (self.model is None or (bool(row.unverified) and not row_drafts.tokens))

    def _needs_landing(self, seat: int, row_drafts: RowDrafts) -> bool:
        """Return whether the host must know drafts that could otherwise stay on the device, because the sampling of
        their row looks back at them."""
        drafts_stay_on_device = self.model is not None and self.model.drafts_stay_on_device
        return drafts_stay_on_device and not row_drafts.tokens and bool(self.sampling.looks_back[seat])

    def _decode(self, chosen: dict[int, RowDrafts], rows: Mapping[int, Candidate], idle: bool) -> dict[int, RowDrafts]:
        """Return the chosen drafts with the tokens of the draft model. Rows that it has none for are left out.

        Drafts that stay on the device need not land before the step is launched. Where the host must know them, they
        land only if no other row waits for them: the device is `idle`, and no row has drafts that stay.
        """
        model = self.model
        wanted = {seat: (rows[seat].sequence, len(p.worth)) for seat, p in chosen.items() if not p.tokens}
        if not wanted or model is None:
            return chosen
        unverified = {seat: flies for seat in wanted if (flies := rows[seat].unverified) is not None}
        known = {seat: row for seat, row in wanted.items() if seat not in unverified}
        staying = {seat: row for seat, row in known.items() if not self._needs_landing(seat, chosen[seat])}
        if not model.drafts_stay_on_device or (idle and not staying and not unverified):
            landing, staying = known, {}
        else:
            landing = {}
        found = dict.fromkeys(wanted, 0)
        calls = [model.begin({seat: wanted[seat] for seat in unverified}, unverified)] if unverified else []
        calls += [model.begin(staying)] if staying else []
        for decoded in filter(None, calls):
            for seat, count in decoded.counts.items():
                chosen[seat], found[seat] = chosen[seat].on_device(count, partial(tokens_of, decoded, seat)), count
        if landing:
            for seat, tokens in model.draft(landing).items():
                constraint = landing[seat][0].constraint
                if constraint is not None:
                    tokens = tokens[: len(constraint.masks_along(tokens))]
                chosen[seat], found[seat] = chosen[seat].with_tokens(tokens), len(tokens)
        return {seat: row_drafts for seat, row_drafts in chosen.items() if found.get(seat, 1)}

    def _offers(self, rows: Mapping[int, Candidate]) -> dict[int, RowDrafts]:
        """Return what each row drafts for the step after its last landing."""
        offered = {}
        by_habit = MOST_HABIT_DRAFTS // max(1, sum(row.sequence.constraint is not None for row in rows.values()))
        for seat, row in rows.items():
            in_flight = (
                row.unverified + 1 if row.builds_on_flight and row.unverified is not None and self.model is None else 0
            )
            row_drafts = self._find_drafts(seat, row.sequence, row.left, in_flight, by_habit)
            if row_drafts is not None and row.unverified is not None and (row_drafts.tokens or self.model is None):
                row_drafts = row_drafts.later(row.unverified)
            if row_drafts is not None and row_drafts.worth and row.sequence.drafting is not None:
                offered[seat] = row.sequence.drafting.bound(row_drafts)
        return offered

    def _note_fruitless(self, seat: int, number: int) -> None:
        """Let a row of free text sleep for some steps if it had nothing to offer for a while."""
        count = self._fruitless[seat] = self._fruitless.get(seat, 0) + 1
        if count > FRUITLESS:
            steps = min(RAREST_QUESTION, 1 << count // FRUITLESS)
            # All rows in the same steps: the others are planned as if there were no drafts.
            self._wake(seat, number + steps - number % steps)

    def _find_drafts(
        self, seat: int, sequence: DraftedSequence, left: int, in_flight: int, by_habit: int
    ) -> RowDrafts | None:
        assert self.drafting is not None
        if sequence.drafting is None:
            return None
        # One token is sampled after the last draft.
        most, constraint = left - 1, sequence.constraint
        if self.sampling.penalised[seat]:
            most = min(most, MOST_HISTORY // sequence.length - 1)
        if constraint is None:
            return sequence.drafting.find_drafts(sequence.generated, most, self.drafting.shared, in_flight)
        assert self.masks is not None
        if not self.masks.affords(constraint):
            return None
        shared, habits, before = self.drafting.shared, self.drafting.habits, constraint.seconds
        found = sequence.drafting.spell(constraint.look_ahead(), sequence.generated, most, by_habit, shared, habits)
        self.masks.spend(constraint.seconds - before)
        return found

    def _probe(self, offered: Mapping[int, RowDrafts], number: int) -> set[int]:
        """Return the seats that probe: those whose turn it is, or if it is time, the most likely."""
        assert self.drafting is not None
        waited = self._waiting & offered.keys()
        if waited or not self.drafting.probes(number, bool(offered)):
            return waited
        best = sorted(offered, key=lambda seat: -sum(offered[seat].worth))
        return set(best[:PROBED_ROWS])

    def _sleep(self, seat: int, sequence: DraftedSequence, number: int) -> None:
        if sequence.drafting is not None:
            # All rows wake in the same steps, because what does not pay in one row may pay in all: at the multiple of
            # their pause that is nearest to its end.
            pause = sequence.drafting.pause()
            end = number + 1 + pause
            self._wake(seat, (end + pause // 2) // pause * pause if pause else end)

    def planned(self, drafts: dict[int, RowDrafts], number: int) -> None:
        """Record the seats that have drafts in a plan. Their tokens are for the host to find."""
        self._drafted_in, self._drafted = number, drafts
        seats = list(drafts)
        self.host_has_token[seats] = True
        self.drafted[seats] = [len(row_drafts.tokens) for row_drafts in drafts.values()]

    def unverified(self, landed: int) -> bool:
        """Return whether drafts are in flight; `landed` is the last plan that is not."""
        return self._drafted_in > landed

    def take_off_board(self, seats: NDArray[np.int64]) -> list[int]:
        """Return those of the seats of a plan whose token the host supplies; their next one is on the board again."""
        if not self.host_has_token.any():
            return []
        stale: list[int] = seats[self.host_has_token[seats]].tolist()
        self.host_has_token[stale] = False
        return stale

    def verified(self, seat: int, sequence: DraftedSequence, row_drafts: RowDrafts, accepted: int, number: int) -> None:
        """Decide when the row of a landed flight drafts again; `number` is the last plan made."""
        if self.model is not None:
            self.model.verified(seat, row_drafts.drafter, accepted)
        if sequence.drafting is not None and not sequence.leaving:
            self._wake(seat, number + sequence.drafting.verified(row_drafts, accepted))
            if accepted:
                self._fruitless.pop(seat, None)
            # What was likely and right is still not worth its costs.
            if accepted == len(row_drafts.tokens) and row_drafts.worth[0] < LIKELY:
                self._waiting.add(seat)

    def awaits(self, decoding: SequenceOf[DraftedSequence], landed: int, builds_on_flight: bool, lost: float) -> bool:
        """Return whether the next step waits for the one in flight, because enough of the decoding rows draft in it.

        If rows can follow, it depends on what they gain by knowing their tokens, and on the share of a step that the
        device waits for the host (`lost`).
        """
        if not self.unverified(landed) or len(self._drafted) < LAND_FIRST_SHARE * len(decoding):
            return False
        if not builds_on_flight or self.drafting is None:
            return True
        known = unknown = float(len(decoding))
        for sequence in decoding:
            row_drafts = self._drafted.get(sequence.seat)
            if row_drafts is not None and sequence.drafting is not None:
                after, along = sequence.drafting.outlook(row_drafts)
                if self.model is not None:
                    # A drafter on the device knows what it continues.
                    along = after
                known += after
                unknown += -1.0 if self.sampling.looks_back[sequence.seat] else along
        return not self.drafting.plans_ahead(known, unknown, lost)


def spread(lengths: list[int], all_drafts: SequenceOf[RowDrafts], following: SequenceOf[bool]) -> None:
    """Move drafts to rows that follow others in flight and have none: without one, such a row misses the step.

    They come from rows with several, the least likely first, so the step keeps its size. Rows whose drafts are worth
    little miss the step, and continue without drafts: with them they would follow for ever.
    """
    missing = [row for row, count in enumerate(lengths) if following[row] and not count]
    if not missing:
        return
    several = ((p.worth[place], row) for row, p in enumerate(all_drafts) for place in range(1, lengths[row]))
    missing.sort(key=lambda row: -all_drafts[row].worth[0])
    for row, (worth, giving) in zip(missing, sorted(several)):
        if all_drafts[row].worth[0] < WORTH_MOVING * worth:
            return
        lengths[row], lengths[giving] = 1, lengths[giving] - 1


def tokens_of(decoded: DecodedDrafts, seat: int) -> tuple[int, ...]:
    return decoded.tokens()[seat]
