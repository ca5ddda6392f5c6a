"""The engine's part in transfers of prefixes: sends those of prefill requests, receives those for later requests.

Runs between steps, in the engine's thread; the transport has threads of its own. No step waits for a transfer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

from weft.base.companions import Companion
from weft.base.errors import InvalidField
from weft.base.transfers import (
    Granted,
    Offer,
    Offered,
    ReceivingEnded,
    SendingEnded,
    TransferEvent,
    Transport,
    UnitReceived,
    UnitsSent,
)
from weft.engine.assembly import PlannedStep
from weft.engine.device import Device
from weft.engine.request import Request
from weft.engine.sequence import Sequence
from weft.memory.ledger import Ledger
from weft.memory.tiers.exchange.arrivals import ArrivalsFull
from weft.memory.tiers.exchange.departures import Departures
from weft.memory.tiers.tiers import Tiers

# Copies to the staging area that are begun in one step.
MOST_PLANS = 8
WAIT_SECONDS = 1e-3
# Pause between two looks at transfers while a step is awaited.
SERVE_SECONDS = 2e-4
NO_DEPARTURES = "needs an engine with the role prefill"


# Called with the number of a request whose transfer is over, and with the error if it has failed.
ReportEnd = Callable[[int, str | None], None]


class Exchange(Companion):
    """`report_end` is called between two steps only. `now` is a clock in seconds."""

    def __init__(
        self,
        transport: Transport,
        device: Device,
        ledger: Ledger,
        tiers: Tiers | None,
        departures: Departures | None,
        report_end: ReportEnd,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self.transport = transport
        self._report_end = report_end
        self._now = now
        # Requests whose transfer is over.
        self._ended: list[tuple[int, str | None]] = []
        self.failed_transfers = self.sent_prefixes = 0
        # Time that requests waited for their transfer after their prompt was computed.
        self.exposed_seconds = 0.0
        self._computed_at: dict[int, float] = {}
        self._copies = device.capabilities.tiers
        self._progress = device.capabilities.progress
        self._ledger = ledger
        self._tiers = tiers
        self.arrivals = None if tiers is None else tiers.arrivals
        self.departures = departures
        self._flights: deque[Any] = deque()
        self._finished: set[int] = set()

    @property
    def busy(self) -> bool:
        """Whether a step has work: copies to the staging area under way or possible, or ends to report."""
        return bool(self._flights or self._ended)

    def check(self, request: Request) -> None:
        """Raise if the prefix of a request cannot be sent."""
        if self.departures is None:
            raise InvalidField("send_to", NO_DEPARTURES)
        if len(request.prompt) % self._ledger.cell or request.params.max_tokens:
            raise InvalidField("send_to", "needs a prompt of whole cells and max_tokens 0")

    # requests -------------------------------------------------------------------------------------------------------

    def begin(self, sequence: Sequence, tenant: bytes) -> None:
        """Offer the prompt of a request to its destination, unless it is being dropped: then it is only computed."""
        destination = sequence.request.send_to
        assert destination is not None
        assert self.departures is not None
        if self._ledger.hides(sequence.keys, lambda: tenant):
            return
        self.departures.begin(sequence.id, sequence.keys, tenant)
        self.transport.open(sequence.id, destination, Offer(tuple(sequence.keys), tenant))

    def launched(self, step: PlannedStep, flight: Any) -> None:
        """Let prefixes leave while a step computes them."""
        departures, cell = self.departures, self._ledger.cell
        if departures is None or self._progress is None or not departures.active:
            return
        for row, grant in step.grants.items():
            sequence = step.sequences[row]
            departure = departures.active.get(sequence.id)
            if departure is None or sequence.leaving or sequence.lease is None:
                continue
            aloft = self._ledger.aloft(sequence.lease, grant, flight, step.plan.number, departure.end * cell)
            departures.launched(sequence.id, aloft)
        self._stage()

    def landed(self, step: PlannedStep) -> None:
        """Note that a step has landed, and that its cells are published."""
        if self.departures is not None and self._progress is not None:
            for row in step.grants:
                self.departures.landed_step(step.sequences[row].id, step.plan.number)

    def serve_until(self, flight: Any) -> None:
        """Let transfers go on until a step has landed, instead of waiting for it."""
        if self.departures is None or self._progress is None:
            return
        while self.departures.active and not self._progress.landed(flight):
            self._go_on()
            self.transport.wait(SERVE_SECONDS)

    def computed(self, sequence: Sequence) -> bool:
        """Keep what a request has computed until it is staged; return whether it departs. Its lease is still open."""
        if self.departures is None or sequence.id not in self.departures.active:
            return False
        lease = sequence.lease
        assert lease is not None
        if not self.departures.computed(sequence.id, lease, self._ledger.point_at(lease, len(sequence.request.prompt))):
            self.abandon(sequence.id)
            return False
        self._computed_at[sequence.id] = self._now()
        # Now: an engine with nothing else to do would sleep until an event arrives.
        self._stage()
        self._advance(sequence.id)
        return True

    def abandon(self, number: int) -> None:
        """End the transfer of a request that was aborted or has failed."""
        if self.departures is not None and number in self.departures.active:
            self.departures.let_go(number)
            self.transport.abandon(number)

    def drop(self, tenant: bytes | None, prefix: bytes | None) -> None:
        """End the transfers of prefixes that are being dropped, so that they come back from no other engine."""
        if self.departures is not None:
            for number in self.departures.chosen(tenant, prefix):
                self.abandon(number)

    # between steps --------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Handle what has happened, begin and land copies, and report the requests whose transfer is over."""
        self._poll()

    def attend(self, idle: bool) -> None:
        """If `idle`, do the same again: what is being sent may hold the memory that requests wait for."""
        if idle and self.departures is not None:
            self._poll(wait=bool(self.departures.in_flight))

    def close(self) -> None:
        self.transport.close()

    def _poll(self, wait: bool = False) -> None:
        self._go_on(wait)
        ended, self._ended = self._ended, []
        for number, error in ended:
            self._report_end(number, error)

    def _go_on(self, wait: bool = False) -> None:
        """Handle what has happened, and begin and land copies. With `wait`, because there is nothing else to do."""
        self._land(wait)
        events = self.transport.poll()
        if wait and not events and not self._flights:
            self.transport.wait(WAIT_SECONDS)
            events = self.transport.poll()
        for event in events:
            self._handle(event)
        self._stage()

    def _stage(self) -> None:
        for _ in range(MOST_PLANS):
            plan = None if self.departures is None else self.departures.plan(self._has_computed)
            if plan is None:
                return
            assert self._copies is not None
            self._flights.append(self._copies.copy(plan))

    def _has_computed(self, flight: Any, layer: int) -> bool:
        # Copies are not begun to wait for their layer on the device: hundreds of them would block the engine's thread.
        return self._progress is None or self._progress.has_computed(flight, layer)

    def _land(self, wait: bool) -> None:
        while self._flights and self._copies is not None:
            if self._copies.copied(self._flights[0], wait) is None:
                return
            self._flights.popleft()
            assert self.departures is not None
            landed = self.departures.landed()
            if landed is not None:
                number, units = landed
                self.transport.send(number, units)
                self._advance(number)
            wait = False

    def _advance(self, number: int) -> None:
        """Finish the transfer of a prefix that is staged as far as its receiver wants it."""
        departures = self.departures
        assert departures is not None
        if number not in self._finished and departures.is_staged(number):
            self._finished.add(number)
            departures.let_go(number)
            self.transport.finish(number)

    def _handle(self, event: TransferEvent) -> None:
        match event:
            case Granted(number, first, end, point):
                assert self.departures is not None
                if number in self.departures.active:
                    self.departures.granted(number, first, end, point)
                    self._stage()
                    self._advance(number)
            case UnitsSent(number, units):
                assert self.departures is not None
                self.departures.sent(number, units)
            case SendingEnded(number, error):
                assert self.departures is not None
                self.departures.ended(number)
                self._finished.discard(number)
                self._note_end(number, error)
                self._ended.append((number, error))
            case Offered(number, offer):
                self._take_offer(number, offer)
            case UnitReceived(number, place):
                self._receive(number, place)
            case ReceivingEnded(number):
                if self.arrivals is not None:
                    self.arrivals.ended(number)

    def _note_end(self, number: int, error: str | None) -> None:
        computed_at = self._computed_at.pop(number, None)
        if error is not None:
            self.failed_transfers += 1
            return
        self.sent_prefixes += 1
        if computed_at is not None:
            self.exposed_seconds += self._now() - computed_at

    # receiving ------------------------------------------------------------------------------------------------------

    def _take_offer(self, number: int, offer: Offer) -> None:
        tiers, arrivals, keys = self._tiers, self.arrivals, list(offer.keys)
        if tiers is None or arrivals is None:
            self.transport.refuse(number, "this engine receives no prefixes")
            return
        if self._ledger.hides(keys, lambda: offer.tenant):
            # It may have been computed before the drop, and would outlive it here.
            arrivals.refused += 1
            self.transport.refuse(number, "its prefix is being dropped")
            return
        if tiers.contradicts(keys):
            arrivals.refused += 1
            self.transport.refuse(number, "the keys of the offer are not those of one prefix")
            return
        reason = arrivals.open(number, offer, tiers.known_cells(keys))
        if reason is not None:
            self.transport.refuse(number, reason)
            return
        self._grant(number)

    def _grant(self, number: int) -> None:
        """Grant the next units of a prefix, confirm it if it is complete, or end it if there is no memory."""
        arrivals = self.arrivals
        assert arrivals is not None
        try:
            found = arrivals.reserve(number)
        except ArrivalsFull:
            arrivals.refused += 1
            self.transport.refuse(number, "arrivals are full")
            return
        if found is not None:
            self.transport.grant(number, found.first, found.end, found.point, found.units)
        if arrivals.complete(number):
            self.transport.confirm(number)

    def _receive(self, number: int, place: int) -> None:
        arrivals = self.arrivals
        if arrivals is None or number not in arrivals.incoming:
            return
        arrivals.received(number, place)
        if arrivals.incoming[number].dropped:
            self.transport.refuse(number, "its prefix was dropped, or another transfer has its keys in other places")
        else:
            self._grant(number)

    def stats(self) -> dict[str, Any]:
        """Return counters and gauges for metrics."""
        found: dict[str, Any] = {"failed": self.failed_transfers}
        if self.departures is not None:
            found |= {
                "sending": len(self.departures.active),
                "sent_bytes": self.departures.sent_bytes,
                "sent_prefixes": self.sent_prefixes,
                "send_seconds": self.transport.send_seconds,
                "exposed_seconds": self.exposed_seconds,
            }
        if self.arrivals is not None:
            found |= {
                "receiving": len(self.arrivals.incoming),
                "received_bytes": self.arrivals.arrived_bytes,
                "received_prefixes": self.arrivals.arrived_prefixes,
                "refused": self.arrivals.refused,
            }
        return found
