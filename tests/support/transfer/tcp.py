"""Two transports in one process, and units between them."""

from __future__ import annotations

import socket
from dataclasses import replace

import numpy as np
import pytest

from tests.support.servers.held_steps import wait_until
from tests.support.tiers.fake_carrier import FakeCarrier
from weft.base.transfers import (
    Destination,
    Offer,
    ReservedUnit,
    StagedUnit,
    TransferEvent,
    UnitsSent,
)
from weft.memory.kinds import Kind
from weft.transfer.connection import Memories
from weft.transfer.messages import Contract
from weft.transfer.pulling import Carriage, Carrier
from weft.transfer.tcp import TcpTransport, TransferDoor

SECRET = b"s" * 32
SIZES = {Kind.PAGE: 4096, Kind.STATE: 1 << 16}
CONTRACT = Contract(b"f" * 32, SIZES)
KEYS = tuple(bytes([each]) * 32 for each in range(3))
OFFER = Offer(KEYS, b"t" * 16)


class End:
    """A transport with memory of its own, and the events that it has reported."""

    def __init__(
        self,
        contract: Contract = CONTRACT,
        secret: bytes = SECRET,
        door: bool = False,
        carrier: Carrier | None = None,
        way: str | None = None,
        **more,
    ) -> None:
        self.memory = {kind: np.zeros((8, size), np.uint8) for kind, size in SIZES.items()}
        bound = None
        if door:
            listener = socket.socket()
            listener.bind(("127.0.0.1", 0))
            bound = TransferDoor(listener, **more)
            self.place = Destination("127.0.0.1", listener.getsockname()[1])
        units = Memories(self.view, self.view)
        self.carrier = carrier
        way = way or ("tcp" if carrier is None else "nixl")
        self.transport = TcpTransport(contract, secret, units, bound, Carriage(way, carrier))
        self.events: list[TransferEvent] = []

    def view(self, kind: str, unit: int) -> memoryview:
        return self.memory[Kind(kind)][unit].data

    def await_event(self, kind: type) -> TransferEvent:
        """The first event of a kind, once it has been reported."""

        def found() -> TransferEvent | None:
            self.events += self.transport.poll()
            return next((event for event in self.events if isinstance(event, kind)), None)

        wait_until(lambda: found() is not None)
        event = found()
        assert event is not None
        return event


@pytest.fixture(params=["tcp", "pulled"])
def both_ways(request):
    made: list[End] = []

    def make() -> tuple[End, End]:
        carriers = [FakeCarrier(), FakeCarrier()] if request.param == "pulled" else [None, None]
        made.extend([End(carrier=carriers[0]), End(door=True, carrier=carriers[1])])
        return made[-2], made[-1]

    yield make
    for end in made:
        end.transport.close()


def page(cell: int, unit: int, **changes) -> StagedUnit:
    parent = KEYS[cell - 1] if cell else None
    return replace(StagedUnit(cell, "page", unit, KEYS[cell], parent, 64 * (cell + 1), b"t" * 16), **changes)


def place(cell: int, unit: int) -> ReservedUnit:
    return ReservedUnit(cell, "page", unit, KEYS[cell], KEYS[cell - 1] if cell else None, 64 * (cell + 1))


def sent_by(sender: End) -> list[StagedUnit]:
    return [unit for event in sender.events if isinstance(event, UnitsSent) for unit in event.units]
