"""The engine's part in transfers of prefixes: sends those of prefill requests, receives those for later requests.

Runs between steps, in the engine's thread; the transport has threads of its own. No step waits for a transfer.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any

from weft.base.errors import InvalidField
from weft.base.grid import first_window_cell
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
from weft.memory.arena import Arena
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.lease import Grant, Lease
from weft.memory.ledger import Ledger
from weft.memory.tiers.exchange.arrivals import ArrivalsFull, ArrivalsLink
from weft.memory.tiers.exchange.departures import Aloft, Departures
from weft.memory.tiers.units import PointUnits

# Copies to the staging area that are begun in one step.
MOST_PLANS = 8
WAIT_SECONDS = 1e-3
# Pause between two looks at transfers while a step is awaited.
SERVE_SECONDS = 2e-4
ABORTED = "the request was aborted"


def staging(ledger: Ledger, size_bytes: int, level: int) -> Departures:
    """Return what stages prefixes in an area of this size, the device's tier of this level."""
    sizes: dict[Kind, int] = {kind: size for kind, size in unit_bytes(ledger.spec).items() if kind is not Kind.TAIL}
    return Departures(ledger.spec, ledger.cache, Arena(sizes, size_bytes), level)


def check_departure(request: Request, ledger: Ledger) -> None:
    """Raise if the prefix of a request cannot be sent."""
    if ledger.departures is None:
        raise InvalidField("send_to", "needs an engine with the role prefill")
    if len(request.prompt) % ledger.cell or request.params.max_tokens:
        raise InvalidField("send_to", "needs a prompt of whole cells and max_tokens 0")


class Exchange:
    """`ended` are the requests whose transfer is over, for the engine to report; an error says why it failed."""

    def __init__(self, transport: Transport, device: Device, ledger: Ledger) -> None:
        self.transport = transport
        self.ended: list[tuple[int, str | None]] = []
        self.failed_transfers = self.sent_prefixes = 0
        # Time that requests waited for their transfer after their prompt was computed.
        self.exposed_seconds = 0.0
        self._computed_at: dict[int, float] = {}
        self._copies = device.capabilities.tiers
        self._progress = device.capabilities.progress
        self._ledger = ledger
        self._flights: deque[Any] = deque()
        self._finished: set[int] = set()

    @property
    def departures(self) -> Departures | None:
        return self._ledger.departures

    @property
    def arrivals(self) -> ArrivalsLink | None:
        return None if self._ledger.tiers is None else self._ledger.tiers.arrivals

    @property
    def busy(self) -> bool:
        """Whether a step has work: copies to the staging area under way or possible, or ends to report."""
        return bool(self._flights or self.ended)

    # requests -------------------------------------------------------------------------------------------------------

    def begin(self, sequence: Sequence, tenant: bytes) -> None:
        """Offer the prompt of a request to its destination, unless it is being dropped: then it is only computed."""
        destination = sequence.request.send_to
        assert destination is not None
        assert self.departures is not None
        if self._ledger.hidden.covers(sequence.keys, lambda: tenant):
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
            first, end = grant.start // cell, grant.end // cell
            pages = self._ledger.page_table[sequence.seat, first:end].tolist() if departures.paged else []
            point = self._point(sequence.lease, grant) if end == departure.end else None
            departures.launched(sequence.id, Aloft(flight, step.plan.number, first, tuple(pages), point))
        self._launch()

    def _point(self, lease: Lease, grant: Grant) -> PointUnits:
        """Return the resume point at the end of a step in flight."""
        ledger, window = self._ledger, tuple[int, ...]()
        if ledger.window:
            first = first_window_cell(grant.end, ledger.window, ledger.cell)
            window = tuple(ledger.window_table[lease.seat, first : grant.end // ledger.cell].tolist())
        return PointUnits(lease.slot, window)

    def landed_step(self, step: PlannedStep) -> None:
        """Note that a step has landed, and that its cells are published."""
        if self.departures is not None and self._progress is not None:
            for row in step.grants:
                self.departures.landed_step(step.sequences[row].id, step.plan.number)

    def serve_until(self, flight: Any) -> None:
        """Let transfers go on until a step has landed, instead of waiting for it."""
        if self.departures is None or self._progress is None:
            return
        while self.departures.active and not self._progress.landed(flight):
            self.poll()
            self.transport.wait(SERVE_SECONDS)

    def computed(self, sequence: Sequence) -> bool:
        """Keep what a request has computed until it is staged; return whether it departs. Its lease is still open."""
        lease, ledger = sequence.lease, self._ledger
        if self.departures is None or sequence.id not in self.departures.active:
            return False
        assert lease is not None
        if lease.hidden:
            # It was not kept, because it is being dropped: the other engine computes it.
            self.abandon(sequence.id)
            return False
        assert lease.node is not None
        window: tuple[int, ...] = ()
        if ledger.window:
            window = tuple(ledger.window_table[lease.seat, lease.window_first : lease.published].tolist())
        self.departures.computed(sequence.id, lease.node, lease.slot, window)
        self._computed_at[sequence.id] = perf_counter()
        # Now: an engine with nothing else to do would sleep until an event arrives.
        self._launch()
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

    def poll(self, wait: bool = False) -> None:
        """Handle what has happened, and begin and land copies. With `wait`, because there is nothing else to do."""
        self._land(wait)
        events = self.transport.poll()
        if wait and not events and not self._flights:
            self.transport.wait(WAIT_SECONDS)
            events = self.transport.poll()
        for event in events:
            self._handle(event)
        self._launch()

    def _launch(self) -> None:
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
                    self._launch()
                    self._advance(number)
            case UnitsSent(number, units):
                assert self.departures is not None
                self.departures.sent(number, units)
            case SendingEnded(number, error):
                assert self.departures is not None
                self.departures.ended(number)
                self._finished.discard(number)
                self._note_end(number, error)
                self.ended.append((number, error))
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
            self.exposed_seconds += perf_counter() - computed_at

    # receiving ------------------------------------------------------------------------------------------------------

    def _take_offer(self, number: int, offer: Offer) -> None:
        tiers, arrivals = self._ledger.tiers, self.arrivals
        if tiers is None or arrivals is None:
            self.transport.refuse(number, "this engine receives no prefixes")
            return
        keys, tries = list(offer.keys), [cache.trie for cache in self._ledger.caches]
        if self._ledger.hidden.covers(keys, lambda: offer.tenant):
            # It may have been computed before the drop, and would outlive it here.
            arrivals.refused += 1
            self.transport.refuse(number, "its prefix is being dropped")
            return
        if len(set(keys)) < len(keys) or any(trie.contradicts(keys) for trie in tries):
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


def join(transport: Transport, device: Device, ledger: Ledger, staging_bytes: int) -> Exchange:
    """Send and receive prefixes over a transport, as far as there is memory for it."""
    if staging_bytes:
        ledger.departures = staging(ledger, staging_bytes, 0 if ledger.tiers is None else len(ledger.tiers.links))
    return Exchange(transport, device, ledger)
