"""Notes what requests and steps do, while a client watches; otherwise the engine has no tracer.

The engine's steps are not looked at one by one: a request that decodes has one event for all steps since the last
batch. What it is about to do is read from the sequences themselves, so nothing else keeps count for a tracer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from weft.base.companions import Companion
from weft.base.tenants import tenant_digest
from weft.engine.assembly import PlannedStep
from weft.engine.events import FinishReason, Output
from weft.engine.planner import Planner
from weft.engine.request import Request
from weft.engine.sequence import Sequence
from weft.engine.tracing.events import (
    MOST_EVENTS,
    MOST_STEPS,
    Computes,
    Decoded,
    Ends,
    Event,
    LoadedTokens,
    Milliseconds,
    MissFacts,
    Preempted,
    RequestState,
    Runs,
    Starts,
    StepFacts,
    TraceBatch,
    Wait,
    Waits,
)
from weft.memory.ledger import Ledger


class Lane:
    """A request that is being watched, and what was reported of it so far."""

    __slots__ = ("accepted", "at", "drafts", "id", "preemptions", "sequence", "state", "tenant", "tokens", "why")

    def __init__(self, sequence: Sequence, at: Milliseconds) -> None:
        self.id = sequence.request.name
        self.tenant = tenant_digest(sequence.request.salt).hex()
        self.sequence = sequence
        self.state = state_of(sequence)
        self.why = sequence.waits_for
        self.at = at
        drafts = sequence.report.drafts
        self.tokens, self.drafts, self.accepted = len(sequence.generated), drafts.proposed, drafts.accepted
        self.preemptions = sequence.report.preemptions


def state_of(sequence: Sequence) -> RequestState:
    """Return what a sequence does, as far as the host knows."""
    if sequence.lease is None:
        return RequestState.WAITS
    # What it has generated since it last started is not among the tokens to compute first.
    return RequestState.DECODES if sequence.length > len(sequence.known) else RequestState.COMPUTES


class Tracer(Companion):
    """`wall` is a clock in seconds of Unix time."""

    def __init__(
        self,
        planner: Planner,
        running: Callable[[], Iterable[Sequence]],
        now: Callable[[], float],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._planner = planner
        self._running = running
        self._now = now
        self._wall = wall
        self._lanes: dict[int, Lane] = {}
        self._events: list[Event] = []
        self._steps: list[StepFacts] = []
        self._lost = 0
        self._preemptions = planner.preemptions
        # When the next step was planned, on both clocks: a CPU computes during its launch.
        self._began, self._began_at = now(), 1000 * wall()
        # When the step in flight began to run, and how many are in flight.
        self._since: float | None = None
        self._flights = 0
        self._opening = False
        # Sequences that have ended and whose last output is to come.
        self._finishing: set[int] = set()

    @property
    def waiting(self) -> bool:
        """Whether there is something to send before the engine sleeps."""
        return bool(self._opening or self._events or self._steps or self._lost)

    def open(self) -> None:
        """Let the next batch have everything that waits or runs."""
        self._opening = True

    def take(self) -> list[TraceBatch]:
        """Return what was noted since the last call, and what runs if that was asked for."""
        at = self._milliseconds()
        found = [self._take_noted(at)]
        if self._opening:
            found.append(self._take_opening(at))
        return [each for each in found if each.events or each.steps or each.lost or each.opening]

    def _take_noted(self, at: Milliseconds) -> TraceBatch:
        for lane in self._lanes.values():
            if lane.state is RequestState.WAITS:
                self._note_wait(lane, at)
            else:
                self._note_decodes(lane, at)
        events, steps, lost = self._events, self._steps, self._lost
        self._events, self._steps, self._lost = [], [], 0
        return TraceBatch(at, events, steps, lost)

    def _take_opening(self, at: Milliseconds) -> TraceBatch:
        self._opening = False
        self._lanes = {each.id: Lane(each, at) for each in self._running() if is_watched(each)}
        ledger = self._planner.ledger
        runs: list[Event] = [facts_of(lane.sequence, ledger, at) for lane in self._lanes.values()]
        return TraceBatch(at, runs[:MOST_EVENTS], lost=len(runs[MOST_EVENTS:]), opening=True)

    # requests -------------------------------------------------------------------------------------------------------

    def prepares(self, request: Request) -> None:
        """Note that the grammar of a request is being compiled: the engine does not have it yet."""
        if request.name:
            at, tenant = self._milliseconds(), tenant_digest(request.salt).hex()
            self._add(Waits(request.name, tenant, at, Wait.GRAMMAR, len(request.known)))

    def refused(self, request: Request, aborted: bool) -> None:
        """Note the end of a request that never came."""
        if request.name:
            reason, tenant = FinishReason.ABORT if aborted else FinishReason.ERROR, tenant_digest(request.salt).hex()
            self._add(Ends(request.name, tenant, self._milliseconds(), reason, 0))

    def added(self, sequence: Sequence) -> None:
        """Note that a request has come to the queue."""
        if not is_watched(sequence):
            return
        at = self._milliseconds()
        lane = self._lanes[sequence.id] = Lane(sequence, at)
        self._add(Waits(lane.id, lane.tenant, at, lane.why, len(sequence.known)))

    def finishes(self, number: int) -> None:
        """Expect the last output of a sequence. Without such, outputs are not looked at."""
        self._finishing.add(number)

    def ended(self, outputs: Iterable[Output]) -> None:
        """Note the ends among the outputs of a step."""
        if not self._finishing:
            return
        for output in outputs:
            if output.finish is None:
                continue
            self._finishing.discard(output.sequence)
            if (lane := self._lanes.pop(output.sequence, None)) is not None:
                at = self._milliseconds()
                self._note_decodes(lane, at)
                # What was computed for another engine goes on there.
                if lane.sequence.request.send_to is None:
                    self._add(Ends(lane.id, lane.tenant, at, output.finish, lane.sequence.answer_length))

    # steps ----------------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        self._began, self._began_at = self._now(), self._milliseconds()

    def launched(self, step: PlannedStep, flight: object) -> None:
        if not self._flights:
            self._since = self._began
        self._flights += 1
        if self._planner.preemptions != self._preemptions:
            self._preemptions = self._planner.preemptions
            self._note_preemptions()
        for row in step.prompt_rows:
            lane = self._lanes.get(step.sequences[row].id)
            if lane is not None and lane.state is RequestState.WAITS:
                self._note_start(lane)

    def landed(self, step: PlannedStep) -> None:
        now, plan, prompt = self._now(), step.plan, 0
        at = self._milliseconds()
        for row in step.prompt_rows:
            start, end = int(plan.start[row]), int(plan.end[row])
            prompt += end - start
            self._note_chunk(self._lanes.get(step.sequences[row].id), start, end, at)
        if self._since is not None:
            drafts = int(plan.drafts.counts.sum()) if step.drafts else 0
            took = 1000 * (now - self._since)
            self._add_step(StepFacts(at, took, plan.rows, len(plan.tokens), prompt, drafts))
        self._since, self._flights = now, max(0, self._flights - 1)

    def _note_chunk(self, lane: Lane | None, start: int, end: int, at: Milliseconds) -> None:
        # A request that was preempted in flight waits already.
        if lane is None or lane.state is not RequestState.COMPUTES:
            return
        known = len(lane.sequence.known)
        self._add(Computes(lane.id, lane.tenant, at, start, end, known))
        if end >= known:
            lane.state, lane.at = RequestState.DECODES, at

    def _note_start(self, lane: Lane) -> None:
        sequence, at = lane.sequence, self._began_at
        report, again = sequence.report, sequence.report.preemptions > 0
        if report.loading_seconds and not again and lane.why is not Wait.LOAD:
            # Shorter than the time between two batches.
            since = at - 1000 * report.loading_seconds
            self._add(Waits(lane.id, lane.tenant, since, Wait.LOAD, len(sequence.known)))
        facts = (
            sequence.request.known_length,
            report.cached_tokens,
            LoadedTokens.of(report),
            MissFacts.of(report.miss),
        )
        self._add(Starts(lane.id, lane.tenant, at, *facts, again))
        lane.state, lane.at = RequestState.COMPUTES, at

    def _note_wait(self, lane: Lane, at: Milliseconds) -> None:
        """Note why a request waits, if that has changed."""
        if lane.why is not lane.sequence.waits_for and lane.sequence.lease is None:
            lane.why = lane.sequence.waits_for
            self._add(Waits(lane.id, lane.tenant, at, lane.why, len(lane.sequence.known)))

    def _note_decodes(self, lane: Lane, at: Milliseconds) -> None:
        drafts, tokens = lane.sequence.report.drafts, len(lane.sequence.generated)
        if tokens == lane.tokens and drafts.proposed == lane.drafts:
            return
        counts = (tokens - lane.tokens, drafts.proposed - lane.drafts, drafts.accepted - lane.accepted)
        self._add(Decoded(lane.id, lane.tenant, at, at - lane.at, *counts))
        lane.at, lane.tokens, lane.drafts, lane.accepted = at, tokens, drafts.proposed, drafts.accepted

    def _note_preemptions(self) -> None:
        at = self._milliseconds()
        for lane in self._lanes.values():
            if lane.preemptions != lane.sequence.report.preemptions:
                self._note_decodes(lane, at)
                lane.preemptions, lane.state = lane.sequence.report.preemptions, RequestState.WAITS
                lane.why = lane.sequence.waits_for
                self._add(Preempted(lane.id, lane.tenant, at))
                self._add(Waits(lane.id, lane.tenant, at, lane.why, len(lane.sequence.known)))

    # ----------------------------------------------------------------------------------------------------------------

    def _milliseconds(self) -> Milliseconds:
        return 1000 * self._wall()

    def _add(self, event: Event) -> None:
        if len(self._events) < MOST_EVENTS:
            self._events.append(event)
        else:
            self._lost += 1

    def _add_step(self, step: StepFacts) -> None:
        if len(self._steps) < MOST_STEPS:
            self._steps.append(step)
        else:
            self._lost += 1


def is_watched(sequence: Sequence) -> bool:
    """Return whether a sequence is a request's that a client may look at, and has not ended."""
    return bool(sequence.request.name) and sequence.reason is None


def answers_to(name: str, request: str) -> bool:
    """Return whether this is the name of a request, or of one of its answers.

    >>> answers_to("a", "a"), answers_to("a#1", "a"), answers_to("ab", "a")
    (True, True, False)
    """
    return name == request or name.startswith(f"{request}#")


def facts_of(sequence: Sequence, ledger: Ledger, at: Milliseconds) -> Runs:
    """Return what is known of a sequence that waits or runs."""
    request, report, state = sequence.request, sequence.report, state_of(sequence)
    prompt, computed = request.known_length, 0
    if state is not RequestState.WAITS:
        computed = max(0, min(int(ledger.computed[sequence.seat]), prompt) - report.cached_tokens)
    return Runs(
        request.name,
        tenant_digest(request.salt).hex(),
        at,
        state,
        sequence.waits_for if state is RequestState.WAITS else None,
        prompt,
        report.cached_tokens,
        LoadedTokens.of(report),
        MissFacts.of(report.miss),
        computed,
        sequence.answer_length,
        report.drafts.proposed,
        report.drafts.accepted,
        report.preemptions,
    )
