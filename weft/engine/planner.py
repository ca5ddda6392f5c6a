"""Plans each step: which sequences decode, which prompts continue and how far, which are admitted or preempted.

Decodes come first, one token each. The rest of the step's token budget goes to prompts, oldest first, then to the
queue. When memory runs out, the youngest sequence is preempted and resumes later from its last checkpoint.
"""

from __future__ import annotations

from functools import partial
from heapq import heapify, heappop, heappush
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from weft.base.config import EngineConfig
from weft.base.grid import floor_to_grid
from weft.base.tenants import tenant_digest
from weft.drafting.model import DraftModel
from weft.drafting.policy.choosing import Drafting, RowDrafts
from weft.drafting.policy.costs import LearnedCosts
from weft.drafting.rows import DraftRows
from weft.engine.assembly import PlannedStep, StepBuilder, assemble
from weft.engine.device import PLANS_ONLY, Capabilities
from weft.engine.masks import MaskFinder
from weft.engine.pacing import Pacing, canonical_end, even_chunk
from weft.engine.seat_sampling import SeatSampling
from weft.engine.sequence import Sequence
from weft.engine.tracing.events import Wait
from weft.engine.waiting_queue import WaitingQueue
from weft.memory.capacity import NO_ROOM
from weft.memory.lease import Grant
from weft.memory.ledger import Ledger

# A lone sequence that finds no memory restarts in an empty arena, at most this often.
MAX_FRESH_STARTS = 3
# Number of waiting requests, from the head of the queue, whose resume points are protected.
LOOK_AHEAD = 8


class Planner:
    """Owns the running sequences and their seats. `landed` is the number of the last plan that has landed.

    `can` is what the device can do besides executing plans.
    """

    def __init__(
        self,
        ledger: Ledger,
        config: EngineConfig,
        drafting: Drafting | None = None,
        draft_model: DraftModel | None = None,
        can: Capabilities = PLANS_ONLY,
    ) -> None:
        self.ledger = ledger
        self.drafting = drafting
        self.config = config
        self.queue = WaitingQueue(config.order, lambda s: ledger.match(s.keys, self._reuse_limit(s)).cached)
        self.sampling = SeatSampling(config.max_sequences)
        self.masks = MaskFinder()
        self.by_seat: list[Sequence | None] = [None] * config.max_sequences
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.leaving: list[Sequence] = []
        self.failed: list[Sequence] = []
        # Whether the device takes masks after the launch of a step.
        self.masks_may_follow = can.supply_masks is not None
        # Whether the device knows, in a step of some size, where drafts end before the host does.
        self.device_builds_on_flight = None if config.exact else can.builds_on_flight
        self.number = 0
        self.landed = 0
        self.preemptions = 0
        self._free_seats = list(range(config.max_sequences))
        heapify(self._free_seats)
        # By seat: samples still to be planned, and the last plan that carries the seat.
        self._left = np.zeros(config.max_sequences, np.int64)
        self._last_plan = np.zeros(config.max_sequences, np.int64)
        self._decode_seats: NDArray[np.int64] | None = None
        # Whether a row of the current plan did not get all the memory that it asked for.
        self._short = False
        self.drafts = DraftRows(drafting, self.sampling, config.max_sequences, draft_model, self.masks)
        self.pacing = Pacing(config, LearnedCosts() if drafting is None else drafting.costs, ledger.cell)
        if can.sizes is not None:
            self.pacing.use_sizes(can.sizes.padded_tokens)
            if drafting is not None:
                drafting.counts_that_fit = can.sizes.draft_counts

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def plan(self) -> PlannedStep | None:
        """Return the next step, or None if there is nothing to do now."""
        rows = StepBuilder()
        if self.drafts.model is not None:
            self.drafts.model.follow(self.by_seat)
        preemptions = self.preemptions
        self._short = False
        self._plan_decodes(rows)
        limit, least = self._limit_prompts(rows)
        self._plan_prefills(rows, limit, least)
        # A sequence that was just preempted would only be preempted again.
        if not self.leaving and self.preemptions == preemptions:
            self._admit(rows, limit, least)
        if limit < self.config.max_tokens_per_step and limit - rows.tokens < least:
            self.pacing.shortened += bool(self.prefilling or len(self.queue))
        self._look_ahead()
        if not rows.tokens:
            return None
        self._take_snapshots(rows)
        self.number += 1
        step = assemble(self.number, rows, self.by_seat, self.ledger, self.sampling)
        self._last_plan[step.plan.seat] = self.number
        self._left[step.plan.seat[step.plan.sampled]] -= 1
        if rows.drafts:
            self._left[step.plan.seat] -= step.plan.drafts.counts
            self.drafts.planned(rows.drafts, self.number)
        return step

    def _take_snapshots(self, rows: StepBuilder) -> None:
        """Add snapshots for later requests, once every row has the memory that it needs itself."""
        found = [self.by_seat[seat] for seat in rows.grants]
        leases = [s.lease for s in found if s is not None and s.lease is not None]
        rows.grants = self.ledger.snapshot(leases, spare=not self._short)

    # decodes --------------------------------------------------------------------------------------------------------

    def _plan_decodes(self, rows: StepBuilder) -> None:
        if self._decode_seats is None:
            self._decode_seats = np.array([s.seat for s in self.decoding], np.int64)
        seats = self._decode_seats[(self._left > 0)[self._decode_seats] & ~self.sampling.waiting[self._decode_seats]]
        followers = self._followers(seats)
        constrained = self.sampling.constrained[seats]
        needs_landing = self.sampling.slow[seats] if self.masks_may_follow else constrained
        dependent = self.drafts.host_has_token[seats] | needs_landing
        if dependent.any():
            # Where drafts in flight will end is unknown until they have landed, and so is what may follow a token in
            # flight; the other rows need not wait.
            seats = seats[~dependent | (self._last_plan[seats] <= self.landed)]
        if self.masks_may_follow and constrained.any():
            waiting = seats[self.sampling.constrained[seats] & (self._last_plan[seats] > self.landed)]
            rows.awaiting_mask = frozenset(waiting.tolist())
        drafts: dict[int, RowDrafts] = {}
        if self.number >= self.drafts.first_wake:
            drafts, seats = self._choose_drafts(seats, followers, rows)
        needy = self.ledger.needs_grant(seats)
        plain, granted = seats[~needy], []
        if needy.any() or drafts:
            preempted = self.preemptions
            granted = self._grant_decodes(seats[needy].tolist(), rows)
            granted += self._grant_drafts(drafts, rows)
            if self.preemptions > preempted or self.leaving:
                plain = np.array([s for s in plain.tolist() if self._runs(s)], np.int64)
        rows.decode_seats = np.concatenate([plain, np.array(granted, np.int64)])
        rows.decode_starts = self.ledger.planned[rows.decode_seats]
        rows.decode_starts[len(plain) :] -= 1
        self.ledger.advance_each(plain)
        stale = self.drafts.take_off_board(rows.decode_seats)
        rows.inputs = {seat: s.generated[-1] for seat in stale if (s := self.by_seat[seat]) is not None}

    def _runs(self, seat: int) -> bool:
        sequence = self.by_seat[seat]
        return sequence is not None and not sequence.leaving

    def _grant_decodes(self, seats: list[int], rows: StepBuilder) -> list[int]:
        """Allocate memory for decodes at the border of a cell, oldest first."""
        granted = []
        sequences = [s for seat in seats if (s := self.by_seat[seat]) is not None]
        for sequence in sorted(sequences, key=lambda s: s.rank):
            if self._runs(sequence.seat) and self.by_seat[sequence.seat] is sequence:
                end = int(self.ledger.planned[sequence.seat]) + 1
                if self._advance(sequence, end, end, rows):
                    granted.append(sequence.seat)
        return granted

    # drafts ---------------------------------------------------------------------------------------------------------

    @property
    def _has_prompts(self) -> bool:
        """Return whether the next step may have prompts."""
        return bool(self.prefilling or (len(self.queue) and self._free_seats))

    @property
    def builds_on_flight(self) -> bool:
        """Return whether rows of the next step may follow drafts in flight. Not beside prompts."""
        return self.device_builds_on_flight is not None and not self._has_prompts and self.drafts.can_build_on_flight

    def _followers(self, seats: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the seats with drafts in flight that may be followed by a row with drafts."""
        if self.drafting is None or not self.drafts.unverified(self.landed) or not self.builds_on_flight:
            return seats[:0]
        unverified = self.drafts.host_has_token[seats] & (self._last_plan[seats] > self.landed)
        # A plan names two checkpoints, so there is one grid position at most between a row's possible starts.
        near = self.drafts.drafted[seats] <= self.ledger.cell
        return seats[unverified & near & ~self.sampling.looks_back[seats]]

    def _choose_drafts(
        self, seats: NDArray[np.int64], followers: NDArray[np.int64], rows: StepBuilder
    ) -> tuple[dict[int, RowDrafts], NDArray[np.int64]]:
        """Return the drafts of this step by seat, and the seats that decode without."""
        every = np.concatenate([seats, followers]) if len(followers) else seats
        awake = self.drafts.awake(every, self.number)
        if not awake:
            return {}, seats
        sequences = [sequence for seat in awake if (sequence := self.by_seat[seat]) is not None]
        sequences = self.drafts.promising(sequences, self.number)
        if not sequences:
            return {}, seats
        count, awake = len(every), [sequence.seat for sequence in sequences]
        room = self.config.max_tokens_per_step - count
        if self.prefilling or len(self.queue):
            # Drafts leave at least half of the budget to prompts.
            room //= 2
        idle, left = self.number == self.landed, self._left[awake].tolist()
        in_flight = None if idle else self._last_plan[awake] > self.landed
        found = self.drafts.candidates(sequences, left, in_flight, self.builds_on_flight)
        fits = partial(self._fits_device, count)
        chosen, awaiting = self.drafts.choose(found, count, room, self.number, idle, self._has_prompts, fits)
        if not chosen and not awaiting:
            return chosen, seats
        rows.following = {seat: unverified for seat in chosen if (unverified := found[seat].unverified) is not None}
        return chosen, np.array([s for s in seats.tolist() if s not in chosen and s not in awaiting], np.int64)

    def _fits_device(self, rows: int, drafting: int, drafts: int) -> bool:
        """Return whether the device can compute a step of this size whose rows follow drafts in flight."""
        if not self.builds_on_flight or self.device_builds_on_flight is None:
            return False
        return self.device_builds_on_flight(rows - drafting, drafting, drafting + drafts)

    def _grant_drafts(self, drafts: dict[int, RowDrafts], rows: StepBuilder) -> list[int]:
        """Allocate memory for decodes with drafts. Return those that have room for one token only."""
        # A sequence may have been preempted for a decode.
        drafts = {seat: row_drafts for seat, row_drafts in drafts.items() if self._runs(seat)}
        if not drafts:
            return []
        seats = np.array(list(drafts), np.int64)
        tokens = np.array([1 + len(row_drafts.tokens) for row_drafts in drafts.values()], np.int64)
        unverified = np.array([rows.following.get(seat, 0) for seat in drafts], np.int64)
        needy = self.ledger.needs_grant(seats, tokens, unverified)
        inside = seats[~needy]
        rows.draft_starts = self.ledger.planned[inside].tolist()
        rows.drafts = {seat: drafts[seat] for seat in inside.tolist()}
        self.ledger.advance_each(inside, tokens[~needy])
        rows.draft_tokens = int(tokens[~needy].sum()) - len(inside)
        return self._grant_across(seats[needy].tolist(), drafts, rows) if needy.any() else []

    def _grant_across(self, seats: list[int], drafts: dict[int, RowDrafts], rows: StepBuilder) -> list[int]:
        """Allocate memory for drafts that leave their cell, oldest first. Return the rows that have one token only.

        Without memory, a row that follows drafts in flight is not part of the step.
        """
        single = []
        sequences = [s for seat in seats if (s := self.by_seat[seat]) is not None]
        for sequence in sorted(sequences, key=lambda s: s.rank):
            seat, lease = sequence.seat, sequence.lease
            if not self._runs(seat) or self.by_seat[seat] is not sequence or lease is None:
                continue
            start = int(self.ledger.planned[seat])
            unverified = rows.following.get(seat, 0)
            grant = self.ledger.advance(lease, start + 1 + len(drafts[seat].tokens), start + 1, unverified)
            if grant is not None:
                rows.grants[seat], rows.drafts[seat] = grant, drafts[seat]
                rows.draft_starts.append(start)
                rows.draft_tokens += len(drafts[seat].tokens)
            elif not unverified and self._advance(sequence, start + 1, start + 1, rows):
                single.append(seat)
        return single

    def undo(self, seats: NDArray[np.int64], samples: NDArray[np.int64]) -> None:
        """Take back samples that were planned after drafts that turned out wrong."""
        self._left[seats] += samples
        self.sampling.undo(seats, samples)

    def awaits_drafts(self, lost: float) -> bool:
        """Return whether the next step should wait for the drafts in flight, which loses this share of a step."""
        return self.drafts.awaits(self.decoding, self.landed, self.builds_on_flight, lost)

    # prompts --------------------------------------------------------------------------------------------------------

    def _limit_prompts(self, rows: StepBuilder) -> tuple[int, int]:
        """Return how many tokens the step may have, and how many of them must be left to begin another chunk."""
        most = self.config.max_tokens_per_step
        if rows.tokens >= most or not (self.pacing.bounded and self.decoding and (self.prefilling or len(self.queue))):
            return most, 1
        drafts = rows.draft_tokens
        budget = self.pacing.prompt_tokens(rows.tokens - drafts, drafts, most - rows.tokens)
        return rows.tokens + budget, min(budget, self.ledger.cell)

    def _plan_prefills(self, rows: StepBuilder, limit: int, least: int) -> None:
        budget = limit - rows.tokens
        for sequence in sorted(self.prefilling, key=lambda s: s.rank):
            if budget < least:
                break
            if not sequence.leaving and sequence.lease is not None:
                budget -= self._plan_prefill(sequence, budget, rows)

    def _plan_prefill(self, sequence: Sequence, budget: int, rows: StepBuilder) -> int:
        """Plan as much of a prompt as budget and memory allow; return the number of tokens planned."""
        start, total, cell = int(self.ledger.planned[sequence.seat]), len(sequence.known), self.ledger.cell
        if sequence.request.send_to is not None:
            budget = min(budget, even_chunk(total - start, self.config.max_tokens_per_step, cell))
        if self.config.exact:
            end = canonical_end(start, budget, len(sequence.request.prompt), total, cell)
        else:
            end = min(total, start + budget)
            if end < total and floor_to_grid(end, cell) > start:
                end = floor_to_grid(end, cell)
        # With little memory left, continue at least to the end of the cell.
        grant = self._advance(sequence, end, min(end, floor_to_grid(start, cell) + cell), rows)
        if grant is None:
            return 0
        complete = grant.end == total
        rows.prefills.append((sequence, start, grant.end, complete and bool(self._left[sequence.seat])))
        if complete:
            self.prefilling.remove(sequence)
            self.decoding.append(sequence)
            self._decode_seats = None
        return grant.end - start

    # admission ------------------------------------------------------------------------------------------------------

    def _admit(self, rows: StepBuilder, limit: int, least: int) -> None:
        budget = limit - rows.tokens
        # Requests that wait for their prefix to be loaded, and start when it has come.
        loading = NO_ROOM
        for sequence in self.queue.head(self.number):
            tenant, ahead = partial(tenant_digest, sequence.request.salt), partial(self._tokens_ahead, rows)
            reusable, total = self._reuse_limit(sequence), len(sequence.known)
            if budget < least or not self._free_seats:
                sequence.waits_for = Wait.STEP if budget < least else Wait.SEQUENCES
                self.ledger.prefetch(sequence.id, sequence.keys, reusable, total, tenant, ahead)
                return
            if sequence.awaits_mask:
                sequence.waits_for = Wait.GRAMMAR
                continue
            match = self.ledger.match(sequence.keys, reusable)
            if self.ledger.expects(sequence.keys, match, reusable):
                sequence.waits_for = Wait.PREFIX
                continue
            needed = self.ledger.room_for(sequence.keys, match.cached, total, loading)
            if needed is None:
                sequence.waits_for = Wait.MEMORY
                return
            if self.ledger.awaits(sequence.id, sequence.keys, reusable, match, tenant, ahead):
                sequence.note_load()
                loading += needed
                continue
            if not self._sit(sequence):
                sequence.waits_for = Wait.MEMORY
                self._empty_arena()
                return
            planned = self._plan_prefill(sequence, budget, rows)
            if not planned:
                # It keeps its seat and its place: `_plan_prefill` has already failed it if it can never run.
                return
            budget -= planned

    def _is_hidden(self, sequence: Sequence) -> bool:
        """Return whether the prefix of a request is being dropped."""
        return self.ledger.hides(sequence.keys, partial(tenant_digest, sequence.request.salt))

    def _reuse_limit(self, sequence: Sequence) -> int:
        """Return how many tokens of a request may come from a cache now."""
        return 0 if self._is_hidden(sequence) else sequence.reuse_limit

    def _tokens_ahead(self, rows: StepBuilder) -> int:
        """Return how many tokens are computed before those of a request that starts now."""
        return rows.tokens + sum(len(s.known) - int(self.ledger.planned[s.seat]) for s in self.prefilling)

    def _look_ahead(self) -> None:
        """Protect the resume points of the next requests in the queue."""
        ahead = list(islice(self.queue, LOOK_AHEAD))
        self.ledger.keep_for([s.id for s in ahead], ((s.keys, self._reuse_limit(s)) for s in ahead))

    def _sit(self, sequence: Sequence) -> bool:
        seat = heappop(self._free_seats)
        request = sequence.request
        lease = self.ledger.open(
            seat,
            sequence.keys,
            len(request.prompt),
            sequence.reuse_limit,
            sequence.declared,
            sequence.plain_key,
            request.boundaries,
            self._is_hidden(sequence),
            partial(tenant_digest, request.salt),
            request.retain,
            sequence.shares_answer,
        )
        if lease is None:
            heappush(self._free_seats, seat)
            return False
        self.queue.remove(sequence)
        sequence.seat, sequence.lease = seat, lease
        again = sequence.report.preemptions > 0
        miss = lease.miss if again else sequence.note_start(lease.miss)
        loaded = self.ledger.count_start(sequence.id, miss, again)
        sequence.report.loaded_tokens += sum(loaded.values())
        sequence.report.disk_tokens += loaded.get("disk", 0)
        sequence.report.remote_tokens += loaded.get("remote", 0)
        self.by_seat[seat] = sequence
        self.sampling.sit(sequence)
        self._left[seat] = sequence.max_tokens - len(sequence.generated)
        self.drafts.sit(seat, sequence)
        self.prefilling.append(sequence)
        return True

    # memory ---------------------------------------------------------------------------------------------------------

    def _advance(self, sequence: Sequence, end: int, least: int, rows: StepBuilder) -> Grant | None:
        """Allocate memory up to `end`, or at least up to `least`; preempt younger sequences if necessary."""
        assert sequence.lease is not None
        grant = self.ledger.advance(sequence.lease, end)
        self._short = self._short or grant is None
        while grant is None:
            if least < end:
                grant = self.ledger.advance(sequence.lease, least)
            if grant is None:
                if not self._make_room(sequence, rows):
                    return None
                grant = self.ledger.advance(sequence.lease, end)
        rows.grants[sequence.seat] = grant
        return grant

    def _make_room(self, sequence: Sequence, rows: StepBuilder) -> bool:
        """Preempt the youngest sequence in favour of `sequence`.

        Not if a flight or a copy is about to land and free memory, or retained prefixes can make room.
        """
        if self.leaving or self.ledger.memory_to_land or self.ledger.makes_room():
            return False
        others = [s for s in (*self.prefilling, *self.decoding) if s is not sequence]
        victims = [s for s in others if s.rank > sequence.rank and not rows.carry(s.seat)]
        if victims:
            return self.leave(max(victims, key=lambda s: s.rank))
        if not others and self.number == self.landed:
            self._start_over(sequence)
        return False

    def _start_over(self, sequence: Sequence) -> None:
        """Restart a lone sequence in an empty arena.

        Nothing in flight could free memory and nothing is left to evict: its units are scattered over slabs, and in an
        empty arena they would not be.
        """
        sequence.fresh_starts += 1
        if sequence.fresh_starts > MAX_FRESH_STARTS:
            self.failed.append(sequence)
            return
        self.leave(sequence)
        # What is retained goes last.
        self.ledger.clear(retained=sequence.fresh_starts > 1)

    def _empty_arena(self) -> None:
        """Forget what is cached, if a request cannot start although no other one has memory.

        The units that it would start from are scattered over all slabs, and none is left for its tail.
        """
        busy = self.running or self.number != self.landed or self.ledger.memory_to_land
        if not busy and not self.ledger.makes_room():
            self.ledger.clear(retained=self.ledger.only_retained)

    def in_flight(self, sequence: Sequence) -> bool:
        return bool(self._last_plan[sequence.seat] > self.landed)

    def leave(self, sequence: Sequence) -> bool:
        """Remove a running sequence from its seat: at once if possible, otherwise when its flight has landed."""
        sequence.leaving = True
        if sequence in self.decoding:
            self.decoding.remove(sequence)
            self._decode_seats = None
        else:
            self.prefilling.remove(sequence)
        if self.in_flight(sequence):
            self.leaving.append(sequence)
            return False
        self._stand_up(sequence)
        return True

    def release_landed(self) -> None:
        """Release sequences whose last flight has landed."""
        still = [s for s in self.leaving if self.in_flight(s)]
        gone = [s for s in self.leaving if not self.in_flight(s)]
        self.leaving = still
        for sequence in gone:
            self._stand_up(sequence)

    def _stand_up(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        self.ledger.close(sequence.lease, returns=sequence.reason is None)
        sequence.lease = None
        self.drafts.stand_up(sequence.seat, sequence.reason is None)
        self.by_seat[sequence.seat] = None
        heappush(self._free_seats, sequence.seat)
        if sequence.reason is None:
            self.preemptions += 1
            sequence.go_back()
            self.queue.add(sequence, self.number)
