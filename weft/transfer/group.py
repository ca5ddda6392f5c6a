"""The transport of an engine with several ranks: every rank carries its own part of a prefix, over its own connection.

The engine sees one transfer. What it asks for, all ranks do; what has happened counts when it has happened on all of
them. If one rank's connection ends, those of the others are ended too.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from weft.base.transfers import (
    Destination,
    Granted,
    Offer,
    Offered,
    ReceivingEnded,
    ReservedUnit,
    SendingEnded,
    StagedUnit,
    TransferEvent,
    Transport,
    UnitReceived,
    UnitsSent,
)
from weft.transfer.messages import GROUP_BYTES


@dataclass(slots=True)
class GroupSending:
    """A prefix that all ranks send: what has happened on each of them, and why it fails if it does."""

    grants: list[list[Granted]]  # by rank
    reported: int = 0  # grants that all ranks had
    sent: Counter[StagedUnit] = field(default_factory=Counter)  # ranks by unit or piece
    ended: set[int] = field(default_factory=set)
    error: str | None = None


@dataclass(slots=True)
class GroupReceiving:
    """A prefix that all ranks receive: its number on each of them, and what has arrived there."""

    numbers: list[int]
    received: Counter[int] = field(default_factory=Counter)  # ranks by place
    ended: set[int] = field(default_factory=set)
    confirmed: bool = False


class GroupTransport:
    """Implements `Transport` over the transports of all ranks, `ends`, in their order."""

    def __init__(self, ends: Sequence[Transport]) -> None:
        self.ends = list(ends)
        self.wake: Callable[[], None] = lambda: None
        self._happened = threading.Event()
        self._events: deque[TransferEvent] = deque()
        self._sending: dict[int, GroupSending] = {}
        self._receiving: dict[int, GroupReceiving] = {}
        # Offers that not all ranks have got yet, by group and rank; and the number here of each rank's transfers.
        self._offers: dict[bytes, dict[int, Offered]] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._next = itertools.count()
        for end in self.ends:
            end.wake = self._ring

    def _ring(self) -> None:
        # Once until the next poll: a bell that rings anyway need not ring again.
        if not self._happened.is_set():
            self._happened.set()
            self.wake()

    @property
    def send_seconds(self) -> float:
        return self.ends[0].send_seconds

    @property
    def send_bytes_per_second(self) -> float | None:
        """The first rank's rate, for its part of a prefix: ranks send side by side."""
        return self.ends[0].send_bytes_per_second

    # sending ----------------------------------------------------------------------------------------------------------

    def open(self, transfer: int, destination: Destination, offer: Offer) -> None:
        ports = (destination.port, *destination.further_ports)
        if len(ports) != len(self.ends):
            error = f"the decode engine has {len(ports)} tensor-parallel ranks, but this one has {len(self.ends)}"
            self._events.append(SendingEnded(transfer, error))
            self._ring()
            return
        self._sending[transfer] = GroupSending([[] for _ in self.ends])
        shared = replace(offer, group=secrets.token_bytes(GROUP_BYTES))
        for end, port in zip(self.ends, ports, strict=True):
            end.open(transfer, replace(destination, port=port, further_ports=()), shared)

    def send(self, transfer: int, units: Sequence[StagedUnit]) -> None:
        for end in self.ends:
            end.send(transfer, units)

    def finish(self, transfer: int) -> None:
        for end in self.ends:
            end.finish(transfer)

    def abandon(self, transfer: int) -> None:
        for end in self.ends:
            end.abandon(transfer)

    # receiving --------------------------------------------------------------------------------------------------------

    def grant(self, transfer: int, first: int, end: int, point: bool, units: Sequence[ReservedUnit]) -> None:
        for rank, number in self._places(transfer):
            rank.grant(number, first, end, point, units)

    def confirm(self, transfer: int) -> None:
        if transfer in self._receiving:
            self._receiving[transfer].confirmed = True
        for rank, number in self._places(transfer):
            rank.confirm(number)

    def refuse(self, transfer: int, reason: str) -> None:
        for rank, number in self._places(transfer):
            rank.refuse(number, reason)

    def _places(self, transfer: int) -> list[tuple[Transport, int]]:
        found = self._receiving.get(transfer)
        return [] if found is None else list(zip(self.ends, found.numbers, strict=True))

    # events -----------------------------------------------------------------------------------------------------------

    def poll(self) -> list[TransferEvent]:
        self._happened.clear()
        for rank, end in enumerate(self.ends):
            for event in end.poll():
                self._merge(rank, event)
        found = list(self._events)
        self._events.clear()
        return found

    def wait(self, seconds: float) -> None:
        self._happened.wait(seconds)

    def close(self) -> None:
        for end in self.ends:
            end.close()

    def _merge(self, rank: int, event: TransferEvent) -> None:
        match event:
            case Granted():
                self._granted(rank, event)
            case UnitsSent(transfer, units):
                self._sent(transfer, units)
            case SendingEnded(transfer, error):
                self._sending_ended(rank, transfer, error)
            case Offered():
                self._offered(rank, event)
            case UnitReceived(number, place):
                self._received(self._numbers.get((rank, number)), place)
            case ReceivingEnded(number):
                self._receiving_ended(rank, number)

    def _granted(self, rank: int, event: Granted) -> None:
        sending = self._sending[event.transfer]
        sending.grants[rank].append(event)
        heads = [grants[sending.reported] for grants in sending.grants if len(grants) > sending.reported]
        if len(heads) < len(self.ends):
            return
        if heads != [event] * len(heads):
            self._fail(event.transfer, "the receiver's ranks have granted different units")
            return
        sending.reported += 1
        self._events.append(event)

    def _sent(self, transfer: int, units: Sequence[StagedUnit]) -> None:
        sending = self._sending[transfer]
        sending.sent.update(units)
        # The staging memory is used again on all ranks at once.
        whole = tuple(unit for unit in units if sending.sent[unit] == len(self.ends))
        if whole:
            self._events.append(UnitsSent(transfer, whole))

    def _sending_ended(self, rank: int, transfer: int, error: str | None) -> None:
        sending = self._sending[transfer]
        sending.ended.add(rank)
        if error is not None:
            self._fail(transfer, error)
        if len(sending.ended) == len(self.ends):
            del self._sending[transfer]
            self._events.append(SendingEnded(transfer, sending.error))

    def _fail(self, transfer: int, error: str) -> None:
        """End a prefix on all ranks, for the first reason there is."""
        if self._sending[transfer].error is None:
            self._sending[transfer].error = error
            self.abandon(transfer)

    def _offered(self, rank: int, event: Offered) -> None:
        offers = self._offers.setdefault(event.offer.group, {})
        if rank in offers:
            self.ends[rank].refuse(event.transfer, "another offer of this rank has the same group")
            return
        offers[rank] = event
        if len(offers) < len(self.ends):
            return
        del self._offers[event.offer.group]
        number = next(self._next)
        parts = [offers[each] for each in range(len(self.ends))]
        self._receiving[number] = GroupReceiving([part.transfer for part in parts])
        self._numbers |= {(each, part.transfer): number for each, part in enumerate(parts)}
        if any(part.offer != event.offer for part in parts):
            self.refuse(number, "the sender's ranks have offered different prefixes")
        else:
            self._events.append(Offered(number, event.offer))

    def _received(self, transfer: int | None, place: int) -> None:
        if transfer is None:
            return
        receiving = self._receiving[transfer]
        receiving.received[place] += 1
        if receiving.received[place] == len(self.ends):
            self._events.append(UnitReceived(transfer, place))

    def _receiving_ended(self, rank: int, number: int) -> None:
        transfer = self._numbers.pop((rank, number), None)
        if transfer is None:
            self._withdraw(rank, number)
            return
        receiving = self._receiving[transfer]
        receiving.ended.add(rank)
        if len(receiving.ended) == len(self.ends):
            del self._receiving[transfer]
            self._events.append(ReceivingEnded(transfer))
        elif not receiving.confirmed:
            self.refuse(transfer, f"the connection of rank {rank} has ended")

    def _withdraw(self, rank: int, number: int) -> None:
        """Forget the offer of a rank whose connection has ended before all ranks had theirs."""
        for group, offers in list(self._offers.items()):
            if rank in offers and offers[rank].transfer == number:
                del self._offers[group][rank]
                for other, event in offers.items():
                    self.ends[other].refuse(event.transfer, f"the connection of rank {rank} has ended")
                if not offers:
                    del self._offers[group]
