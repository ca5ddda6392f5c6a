"""The rate of transfers between two processes without engines: `python -m benchmarks.disaggregated --only rate`.

Memory of one process arrives in that of the other, over TCP or read by NIXL, through the transports that engines use:
with headers, checksums on both sides and confirmations.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
from collections import Counter
from hashlib import sha256
from time import perf_counter

import numpy as np

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
    TransferSettings,
    UnitReceived,
)
from weft.memory.kinds import Kind
from weft.start.disaggregated import carriage_of
from weft.transfer.connection import Memories
from weft.transfer.messages import Contract
from weft.transfer.tcp import TcpTransport, TransferDoor

SECRET = b"only for measurements on this machine"
CELL = 64
TENANT = b"t" * 16


class Side:
    """One end: an area of pages, and its transport."""

    def __init__(self, way: str, unit_bytes: int, units: int, door: TransferDoor | None = None) -> None:
        self.area = np.ones(unit_bytes * units, np.uint8)
        self.keys = tuple(sha256(bytes([cell % 256, cell // 256])).digest() for cell in range(units))
        data = self.area.data

        def find(kind: str, unit: int) -> memoryview:
            return data[unit * unit_bytes : (unit + 1) * unit_bytes]

        contract = Contract(b"f" * 32, {Kind.PAGE: unit_bytes})
        carriage = carriage_of(TransferSettings("both", SECRET, way=way), data)
        self.transport = TcpTransport(contract, SECRET, Memories(find, find), door, carriage)

    def fields(self, cell: int) -> tuple[int, str, int, bytes, bytes | None, int]:
        parent = self.keys[cell - 1] if cell else None
        return cell, Kind.PAGE.value, cell, self.keys[cell], parent, CELL * (cell + 1)

    def events(self) -> list[TransferEvent]:
        self.transport.wait(1.0)
        return self.transport.poll()


def send(there: Destination, way: str, unit_bytes: int, units: int, repeats: int) -> None:
    """Send all pages of an area, some times. Runs in a process of its own."""
    side = Side(way, unit_bytes, units)
    for number in range(repeats):
        side.transport.open(number, there, Offer(side.keys, TENANT))
        ended = False
        while not ended:
            for event in side.events():
                if isinstance(event, Granted):
                    side.transport.send(number, [StagedUnit(*side.fields(cell), TENANT) for cell in range(units)])
                    side.transport.finish(number)
                elif isinstance(event, SendingEnded):
                    assert event.error is None, event.error
                    ended = True
    side.transport.close()


def measure(way: str, unit_bytes: int, units: int, repeats: int = 5) -> float:
    """Return the median rate in bytes per second, from the offer to the last page."""
    listener = socket.create_server(("127.0.0.1", 0))
    side = Side(way, unit_bytes, units, TransferDoor(listener))
    there = Destination("127.0.0.1", listener.getsockname()[1])
    # The first one touches the memory, and connects.
    given = (there, way, unit_bytes, units, repeats + 1)
    sender = multiprocessing.get_context("spawn").Process(target=send, args=given)
    sender.start()
    began: dict[int, float] = {}
    arrived: Counter[int] = Counter()
    seconds, ended = [], 0
    while ended <= repeats:
        for event in side.events():
            if isinstance(event, Offered):
                began[event.transfer] = perf_counter()
                places = [ReservedUnit(*side.fields(cell)) for cell in range(units)]
                side.transport.grant(event.transfer, 0, units, False, places)
            elif isinstance(event, UnitReceived):
                arrived[event.transfer] += 1
                if arrived[event.transfer] == units:
                    seconds.append(perf_counter() - began[event.transfer])
                    side.transport.confirm(event.transfer)
            elif isinstance(event, ReceivingEnded):
                assert arrived[event.transfer] == units, "a transfer has failed"
                ended += 1
    sender.join()
    side.transport.close()
    return unit_bytes * units / statistics.median(seconds[1:])
