"""Transfers between two transports in one process: what is accepted, what is refused, what ends what.

`both_ways`: the payload comes over the connection, or is pulled by a carrier that stands for NIXL.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from tests.support.servers.held_steps import wait_until
from tests.support.transfer.tcp import CONTRACT, KEYS, OFFER, SECRET, End, both_ways, page, place, sent_by
from weft.base.transfers import (
    Destination,
    Granted,
    Offered,
    ReceivingEnded,
    ReservedUnit,
    SendingEnded,
    StagedUnit,
    UnitReceived,
    UnitsSent,
)
from weft.memory.kinds import Kind
from weft.transfer.connection import Memories
from weft.transfer.sending import ReceiverDebt
from weft.transfer.tcp import TcpTransport, TransferDoor
from weft.wire.tls import TlsFiles

__all__ = ["both_ways"]


@pytest.fixture
def ends():
    made: list[End] = []

    def make(**options) -> tuple[End, End]:
        made.extend([End(**options), End(door=True)])
        return made[-2], made[-1]

    yield make
    for end in made:
        end.transport.close()


def test_granted_units_arrive_in_their_places_and_the_sender_hears_of_the_end(both_ways):
    sender, receiver = both_ways()
    sender.memory[Kind.PAGE][5] = 7
    sender.memory[Kind.STATE][2] = 9
    sender.transport.open(4, receiver.place, OFFER)
    offered = receiver.await_event(Offered)
    assert offered.offer == OFFER
    point = ReservedUnit(3, "state", 1, KEYS[2], None, 192)
    receiver.transport.grant(offered.transfer, 2, 3, True, [place(2, 6), point])
    assert sender.await_event(Granted) == Granted(4, 2, 3, True)
    sender.transport.send(4, [page(2, 5), StagedUnit(3, "state", 2, KEYS[2], None, 192, b"t" * 16)])
    sender.transport.finish(4)
    receiver.await_event(UnitReceived)
    wait_until(lambda: receiver.events.extend(receiver.transport.poll()) or len(receiver.events) >= 3)
    assert (receiver.memory[Kind.PAGE][6] == 7).all()
    assert (receiver.memory[Kind.STATE][1] == 9).all()
    receiver.transport.confirm(offered.transfer)
    assert sender.await_event(SendingEnded) == SendingEnded(4, None)
    assert [unit.place for unit in sent_by(sender)] == [2, 3]
    receiver.await_event(ReceivingEnded)


def test_units_that_are_sent_together_are_all_reported_in_order(ends):
    sender, receiver = ends()
    sender.transport.open(4, receiver.place, OFFER)
    offered = receiver.await_event(Offered)
    units = [ReservedUnit(3 + each, "state", each % 4, KEYS[2], None, 192) for each in range(40)]
    receiver.transport.grant(offered.transfer, 3, 3, True, units)
    sender.await_event(Granted)
    # At once, as when the engine has staged several pieces.
    orders = [StagedUnit(3 + each, "state", each % 4, KEYS[2], None, 192, b"") for each in range(40)]
    sender.transport.send(4, orders)
    wait_until(lambda: sender.events.extend(sender.transport.poll()) or len(sent_by(sender)) == 40)
    assert sent_by(sender) == orders


def test_a_prefix_travels_over_tls_that_is_bound_to_the_certificate(tmp_path):
    trustme = pytest.importorskip("trustme")
    (tmp_path / "one.pem").write_bytes(trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.bytes())
    receiver = End(door=True, tls=TlsFiles(str(tmp_path / "one.pem")))
    sender = End()
    sender.memory[Kind.STATE][:] = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)[: 1 << 16]
    there = replace(receiver.place, secure=True)
    sender.transport.open(1, there, OFFER)
    offered = receiver.await_event(Offered)
    units = [ReservedUnit(3 + each, "state", each, KEYS[2], None, 192) for each in range(4)]
    receiver.transport.grant(offered.transfer, 3, 3, True, units)
    sender.await_event(Granted)
    sender.transport.send(1, [StagedUnit(3 + each, "state", each, KEYS[2], None, 192, b"") for each in range(4)])
    wait_until(lambda: receiver.events.extend(receiver.transport.poll()) or len(receiver.events) >= 5)
    assert (receiver.memory[Kind.STATE][:4] == sender.memory[Kind.STATE][:4]).all()
    receiver.transport.confirm(offered.transfer)
    assert sender.await_event(SendingEnded) == SendingEnded(1, None)
    # Without TLS, the same secret proves nothing there. What is sent looks like the beginning of a long record of TLS.
    sender.events.clear()
    impatient = End(door=True, tls=TlsFiles(str(tmp_path / "one.pem")), handshake_seconds=0.1)
    sender.transport.open(2, impatient.place, OFFER)
    assert sender.await_event(SendingEnded).error is not None
    for each in (sender, receiver, impatient):
        each.transport.close()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fingerprint": b"g" * 32}, "another model"),
        ({"ranks": 2}, "number of tensor-parallel ranks: 2 instead of 1"),
        ({"rank": 1}, "another rank: 1 instead of 0"),
        ({"form": "Tiny 2, plain 1"}, "another computation: 'Tiny 2, plain 1' instead of"),
        ({"unit_bytes": {Kind.PAGE: 4096, Kind.STATE: 64}}, "another size of units"),
    ],
)
def test_units_that_mean_something_else_are_refused_by_name(ends, changes, named):
    sender, receiver = ends(contract=replace(CONTRACT, **changes))
    sender.transport.open(1, receiver.place, OFFER)
    ended = sender.await_event(SendingEnded)
    assert named in ended.error
    assert not [event for event in receiver.transport.poll() if isinstance(event, Offered)]


def test_a_sender_without_the_secret_is_refused_before_its_offer_is_read(ends):
    sender, receiver = ends(secret=b"x" * 32)
    sender.transport.open(1, receiver.place, OFFER)
    assert sender.await_event(SendingEnded).error is not None
    assert receiver.transport.poll() == []


@pytest.mark.parametrize(
    "unit",
    [
        page(1, 5),  # not granted
        page(2, 5, key=KEYS[1]),
        page(2, 5, parent=KEYS[0]),
        page(2, 5, position=64),
        StagedUnit(2, "state", 5, KEYS[2], KEYS[1], 192, b""),  # larger than its place
    ],
    ids=["place", "key", "parent", "position", "kind"],
)
def test_a_unit_that_was_not_granted_ends_the_transfer_and_writes_nothing(both_ways, unit):
    sender, receiver = both_ways()
    sender.memory[Kind(unit.kind)][unit.unit] = 7
    sender.transport.open(1, receiver.place, OFFER)
    offered = receiver.await_event(Offered)
    receiver.transport.grant(offered.transfer, 2, 3, False, [place(2, 6)])
    sender.await_event(Granted)
    sender.transport.send(1, [unit])
    receiver.await_event(ReceivingEnded)
    assert not [event for event in receiver.events if isinstance(event, UnitReceived)]
    assert all((memory == 0).all() for memory in receiver.memory.values())
    assert sender.await_event(SendingEnded).error is not None


def test_a_transfer_that_is_refused_or_abandoned_ends_on_both_sides(both_ways):
    sender, receiver = both_ways()
    sender.transport.open(1, receiver.place, OFFER)
    offered = receiver.await_event(Offered)
    receiver.transport.refuse(offered.transfer, "arrivals are full")
    assert "arrivals are full" in sender.await_event(SendingEnded).error
    receiver.await_event(ReceivingEnded)
    sender.events.clear()
    receiver.events.clear()
    sender.transport.open(2, receiver.place, OFFER)
    receiver.await_event(Offered)
    sender.transport.abandon(2)
    sender.await_event(SendingEnded)
    receiver.await_event(ReceivingEnded)


def test_an_engine_that_cannot_be_reached_ends_the_transfer():
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    end = End()
    end.transport.open(1, Destination("127.0.0.1", port), OFFER)
    assert end.await_event(SendingEnded).error is not None


def test_a_receiver_that_does_not_read_stops_only_its_own_transfer(ends):
    """The engine's thread never waits for the network: every call returns while the peer is stuck."""
    sender, receiver = ends()
    stuck = socket.socket()
    stuck.bind(("127.0.0.1", 0))
    stuck.listen()
    sender.transport.open(1, Destination("127.0.0.1", stuck.getsockname()[1]), OFFER)
    sender.transport.send(1, [page(0, 0)] * 4096)
    sender.transport.open(2, receiver.place, OFFER)
    offered = receiver.await_event(Offered)
    receiver.transport.confirm(offered.transfer)
    assert sender.await_event(SendingEnded) == SendingEnded(2, None)
    sender.transport.abandon(1)
    wait_until(lambda: sender.events.extend(sender.transport.poll()) or len(sender.events) >= 2)
    stuck.close()


def test_a_stranger_that_sends_noise_is_disconnected(ends):
    _, receiver = ends()
    with socket.create_connection((receiver.place.host, receiver.place.port)) as stranger:
        stranger.sendall(b"\xff" * 64)
        stranger.settimeout(30)
        with suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    assert receiver.transport.poll() == []


def test_a_stranger_that_sends_a_byte_at_a_time_is_cut_off():
    end = End(door=True, handshake_seconds=0.2)
    with socket.create_connection((end.place.host, end.place.port)) as stranger, suppress(ConnectionError):
        # The length of a message that never ends; without a deadline this would go on for ever.
        stranger.sendall((200).to_bytes(4, "big"))
        while True:
            stranger.sendall(b"x")
            time.sleep(0.01)
    end.transport.close()


def test_strangers_cannot_keep_a_sender_out(ends):
    sender, receiver = ends()
    strangers = [socket.create_connection((receiver.place.host, receiver.place.port)) for _ in range(48)]
    sender.transport.open(1, receiver.place, OFFER)
    receiver.await_event(Offered)
    for stranger in strangers:
        stranger.close()


def test_no_thread_is_left_when_a_transport_is_closed(both_ways):
    sender, receiver = both_ways()
    sender.transport.open(1, receiver.place, OFFER)
    receiver.await_event(Offered)
    sender.transport.close()
    receiver.transport.close()
    names = ("weft-send", "weft-receive", "weft-transfers")
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith(names)])


def test_a_transfer_to_a_host_that_is_no_name_fails():
    end = End()
    end.transport.open(1, Destination("h" * 70 + ".example", 1), OFFER)
    assert end.await_event(SendingEnded).error is not None


def test_a_sender_that_fails_in_any_way_does_not_report_success(both_ways):
    sender, receiver = both_ways()
    sender.transport.open(1, receiver.place, OFFER)
    offered = receiver.await_event(Offered)
    receiver.transport.grant(offered.transfer, 0, 1, False, [place(0, 6)])
    sender.await_event(Granted)
    # Its memory has no such unit.
    sender.transport.send(1, [page(0, 99)])
    assert sender.await_event(SendingEnded).error is not None


def test_a_door_without_descriptors_for_one_connection_accepts_the_next(ends, monkeypatch):
    sender, receiver = ends()
    pair, failures = socket.socketpair, [OSError(24, "Too many open files")]

    def scarce_pair(*given):
        if failures:
            raise failures.pop()
        return pair(*given)

    monkeypatch.setattr("weft.transfer.connection.socket.socketpair", scarce_pair)
    with socket.create_connection((receiver.place.host, receiver.place.port)) as stranger:
        stranger.settimeout(30)
        assert stranger.recv(1) == b""
    assert not failures
    sender.transport.open(1, receiver.place, OFFER)
    receiver.await_event(Offered)


class BrokenListener:
    """A socket that cannot accept, some number of times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.failed = threading.Event()

    def listen(self, backlog: int) -> None:
        pass

    def settimeout(self, seconds: float) -> None:
        pass

    def accept(self):
        if not self.failures:
            self.failed.set()
            raise TimeoutError
        self.failures -= 1
        raise OSError(24, "Too many open files")

    def close(self) -> None:
        pass


def test_connections_that_cannot_be_accepted_do_not_fill_the_log(monkeypatch, caplog):
    monkeypatch.setattr("weft.transfer.tcp.LOG_SECONDS", 1e9)
    monkeypatch.setattr("weft.transfer.tcp.PAUSE_SECONDS", 0.0)
    listener = BrokenListener(50)
    transport = TcpTransport(CONTRACT, SECRET, Memories(), TransferDoor(listener))
    assert listener.failed.wait(30)
    transport.close()
    assert [record.getMessage() for record in caplog.records if "Too many open files" in record.getMessage()] == [
        "refused 1 connections for transfers, the last one because: [Errno 24] Too many open files"
    ]


class HandClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = HandClock()
    monkeypatch.setattr("weft.transfer.sending.monotonic", found)
    monkeypatch.setattr("weft.transfer.connection.PULSE_SECONDS", 0.01)
    return found


def test_a_sender_gives_up_a_receiver_that_grants_no_more(ends, clock):
    sender, receiver = ends()
    sender.transport.open(1, receiver.place, OFFER)
    offered = receiver.await_event(Offered)
    receiver.transport.grant(offered.transfer, 0, 1, False, [place(0, 6)])
    sender.await_event(Granted)
    sender.transport.send(1, [page(0, 5)])
    receiver.await_event(UnitReceived)
    sender.await_event(UnitsSent)
    # The clock moves on until the sender has read it: it may begin to wait a moment after the unit was sent.
    wait_until(
        lambda: setattr(clock, "now", clock.now + 60) or sender.events.extend(sender.transport.poll()) or ended(sender)
    )
    assert "does not answer" in sender.await_event(SendingEnded).error


def ended(end: End) -> bool:
    return any(isinstance(event, SendingEnded) for event in end.events)


def test_a_receiver_owes_nothing_while_the_sender_computes(clock):
    debt = ReceiverDebt(cells=3)
    debt.begin()
    debt.granted(2)
    clock.now = 1000.0
    debt.sent_page(0)
    assert not debt.overdue
    debt.sent_page(1)
    clock.now = 2000.0
    assert debt.overdue
    debt.granted(2)
    assert debt.overdue, "the same grant again is no answer"
    debt.granted(3)
    debt.sent_page(2)
    assert not debt.overdue, "all is granted: the sender's turn is to finish"
    debt.begin()
    clock.now = 3000.0
    assert debt.overdue


def test_both_ends_notice_that_the_other_machine_has_vanished(ends, monkeypatch):
    watched: list[tuple[str, int]] = []

    def note(stream: socket.socket) -> None:
        watched.append(stream.getsockname())

    monkeypatch.setattr("weft.transfer.sending.notice_death", note)
    monkeypatch.setattr("weft.transfer.tcp.notice_death", note)
    sender, receiver = ends()
    sender.transport.open(1, receiver.place, OFFER)
    receiver.await_event(Offered)
    assert len(set(watched)) == 2
