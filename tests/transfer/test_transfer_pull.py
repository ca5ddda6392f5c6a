"""Units that the receiver reads out of the sender's memory: who may use which memory, whatever ends a transfer.

The carrier is a fake that reads when the test lets it; the connections are real. `test_transfer_nixl.py` has NIXL.
"""

from __future__ import annotations

import errno
import socket
import threading
from contextlib import suppress
from typing import Any

import pytest

from tests.support.servers.held_steps import wait_until
from tests.support.tiers.fake_carrier import METADATA
from tests.support.tiers.pulled import begin, count, pair, take_events
from tests.support.transfer.tcp import CONTRACT, OFFER, SECRET, End, page, place
from weft.base.transfers import (
    Destination,
    Granted,
    Offered,
    ReceivingEnded,
    SendingEnded,
    UnitReceived,
    UnitsSent,
)
from weft.memory.kinds import Kind
from weft.memory.tiers.exchange.sent_units import header_of_staged
from weft.transfer import sending
from weft.transfer.connection import TransferConnection, channel_of
from weft.transfer.messages import (
    MAX_METADATA_BYTES,
    MAX_OFFER_BYTES,
    ConfirmMessage,
    FinishMessage,
    GrantMessage,
    Introduction,
    OfferMessage,
    ReadyMessage,
    TakenMessage,
    WayMessage,
    framed,
    read_from_receiver,
    read_from_sender,
)
from weft.transfer.pulling import Readings, address_of
from weft.transfer.sending import ReceiverDebt
from weft.wire.handshake import MAX_BYTES, ReplicaSide, RouterSide
from weft.wire.messages import Message
from weft.wire.versions import TRANSFER

__all__ = ["pair"]
POISON = 0xEE


class Reached:
    """Says that a method was entered."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.event, original = threading.Event(), getattr(owner, name)

        def entered(*given: Any) -> Any:
            self.event.set()
            return original(*given)

        patch.setattr(owner, name, entered)

    def wait(self) -> None:
        wait_until(self.event.is_set)


# memory -----------------------------------------------------------------------------------------------------------


def test_a_staged_unit_is_not_used_again_before_its_read_has_ended(pair):
    sender, receiver = pair()
    begin(sender, receiver)
    # The second is announced after all that the sender does with the first.
    wait_until(lambda: receiver.carrier.reading == 2)
    for event in take_events(sender):
        if isinstance(event, UnitsSent):
            sender.memory[Kind.PAGE][event.units[0].unit] = POISON
    receiver.carrier.finish()
    receiver.await_event(UnitReceived)
    assert (receiver.memory[Kind.PAGE][4] == 10).all()
    wait_until(lambda: count(sender, UnitsSent) == 1)
    receiver.carrier.finish()
    wait_until(lambda: count(sender, UnitsSent) == 2)


@pytest.mark.parametrize("ends", ["the sender abandons", "the receiver refuses"])
def test_neither_side_frees_memory_while_a_read_is_under_way(pair, monkeypatch, ends):
    settles = Reached(monkeypatch, TransferConnection, "hears_end")
    drains = Reached(monkeypatch, Readings, "wait")
    sender, receiver = pair()
    number = begin(sender, receiver, pages=1)
    wait_until(lambda: receiver.carrier.reading == 1)
    if ends == "the sender abandons":
        sender.transport.abandon(1)
    else:
        receiver.transport.refuse(number, "its prefix was dropped")
    drains.wait()
    settles.wait()
    assert not count(sender, SendingEnded)
    assert not count(receiver, ReceivingEnded)
    receiver.carrier.finish()
    receiver.await_event(ReceivingEnded)
    assert sender.await_event(SendingEnded).error is not None
    assert not count(receiver, UnitReceived)
    wait_until(lambda: sender.carrier.attending == 0)
    assert not [line for line in sender.carrier.log if "retired" in line]


def test_a_unit_that_was_overwritten_before_it_was_read_is_not_accepted(pair):
    sender, receiver = pair()
    begin(sender, receiver, pages=1)
    wait_until(lambda: receiver.carrier.reading == 1)
    sender.memory[Kind.PAGE][0] = POISON
    receiver.carrier.finish()
    receiver.await_event(ReceivingEnded)
    assert not count(receiver, UnitReceived)
    assert sender.await_event(SendingEnded).error is not None


# peers that die ---------------------------------------------------------------------------------------------------


class BareSender:
    """A sender without a transport: the test says what it sends, and when its process ends."""

    def __init__(self, receiver: End) -> None:
        there = (receiver.place.host, receiver.place.port)
        self.connection = TransferConnection(socket.create_connection(there))
        side = RouterSide(SECRET, TRANSFER, channel_of(None))
        self.connection.write(side.proof(self.connection.read_message(MAX_BYTES)))
        side.check(self.connection.read_message(MAX_BYTES))
        self.memory = bytearray(b"\x05" * 4096)

    def say(self, message: Message) -> None:
        self.connection.write(framed(message))

    def offer(self, introduction: Introduction | None = None) -> None:
        self.say(CONTRACT.offer(OFFER, introduction or Introduction("bare", METADATA)))

    def hear(self) -> Any:
        return read_from_receiver(self.connection.read_message(MAX_OFFER_BYTES))

    def ready(self) -> ReadyMessage:
        view = memoryview(self.memory)
        return ReadyMessage(header_of_staged(page(0, 0), view).encode(), 0, address_of(view))


def test_the_sender_of_a_closed_receiver_hears_the_end_after_its_reads(pair, monkeypatch):
    drains, closing = Reached(monkeypatch, Readings, "wait"), threading.Event()
    _, receiver = pair()
    sender = BareSender(receiver)
    sender.offer()
    number = receiver.await_event(Offered).transfer
    receiver.transport.grant(number, 0, 1, False, [place(0, 6)])
    assert (sender.hear(), sender.hear()) == (WayMessage(True), GrantMessage(0, 1, False))
    sender.say(sender.ready())
    wait_until(lambda: receiver.carrier.reading == 1)
    close = receiver.carrier.close
    monkeypatch.setattr(receiver.carrier, "close", lambda: closing.wait() and close())
    thread = threading.Thread(target=receiver.transport.close)
    thread.start()
    drains.wait()
    # An end that came before the reads is here already.
    assert not sender.connection.hears_end(0.05)
    closing.set()
    assert sender.connection.hears_end(30)
    thread.join()
    assert receiver.carrier.log == ["read"]
    sender.connection.close()


@pytest.mark.parametrize("stage", ["connected", "offered", "granted", "ready", "taken", "finished"])
def test_a_receiver_ends_when_its_sender_dies_at_any_stage(pair, stage):
    _, receiver = pair()
    sender = BareSender(receiver)
    for step in ("connected", "offered", "granted", "ready", "taken", "finished"):
        if step == "offered":
            sender.offer()
            number = receiver.await_event(Offered).transfer
            assert sender.hear() == WayMessage(True)
        elif step == "granted":
            receiver.transport.grant(number, 0, 1, False, [place(0, 6)])
            assert sender.hear() == GrantMessage(0, 1, False)
        elif step == "ready":
            sender.say(sender.ready())
            wait_until(lambda: receiver.carrier.reading == 1)
        elif step == "taken":
            receiver.carrier.finish()
            assert sender.hear() == TakenMessage(0, 0)
        elif step == "finished":
            sender.say(FinishMessage())
        if step == stage:
            break
    sender.connection.close()
    if stage == "ready":
        assert not count(receiver, ReceivingEnded)
        receiver.carrier.finish("the peer has died")
    if stage != "connected":
        receiver.await_event(ReceivingEnded)
    names = ("weft-receive",)
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith(names)])
    assert count(receiver, UnitReceived) == (stage in ("taken", "finished"))


class BareReceiver:
    """A receiver without a transport, likewise."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.place = Destination("127.0.0.1", self.listener.getsockname()[1])

    def accept(self) -> None:
        stream, _ = self.listener.accept()
        self.connection = TransferConnection(stream)
        side = ReplicaSide(SECRET, TRANSFER, channel_of(None))
        self.connection.write(side.hello())
        self.connection.write(side.welcome(self.connection.read_message(MAX_BYTES)))

    def say(self, message: Message) -> None:
        self.connection.write(framed(message))

    def hear(self) -> Any:
        return read_from_sender(self.connection.read_message(MAX_OFFER_BYTES))

    def close(self) -> None:
        self.connection.close()
        self.listener.close()


STAGES = ("offered", "agreed", "granted", "ready", "taken", "finished")


def lead(sender: End, receiver: BareReceiver, stage: str) -> None:
    """Take a transfer of one page to a stage."""
    sender.transport.open(1, receiver.place, OFFER)
    receiver.accept()
    assert isinstance(receiver.hear(), OfferMessage)
    for step in STAGES[1 : STAGES.index(stage) + 1]:
        if step == "agreed":
            receiver.say(WayMessage(True))
        elif step == "granted":
            receiver.say(GrantMessage(0, 1, False))
            sender.await_event(Granted)
        elif step == "ready":
            sender.transport.send(1, [page(0, 0)])
            assert isinstance(receiver.hear(), ReadyMessage)
        elif step == "taken":
            receiver.say(TakenMessage(0, 0))
            sender.await_event(UnitsSent)
        elif step == "finished":
            sender.transport.finish(1)
            assert isinstance(receiver.hear(), FinishMessage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_sender_ends_when_its_receiver_dies_at_any_stage(pair, stage):
    sender, _ = pair()
    receiver = BareReceiver()
    lead(sender, receiver, stage)
    receiver.close()
    assert sender.await_event(SendingEnded).error is not None
    assert count(sender, UnitsSent) == (stage in ("taken", "finished"))
    wait_until(lambda: sender.carrier.attending == 0)
    assert sender.carrier.log == []


def test_units_of_a_receiver_that_cannot_be_heard_are_freed_when_reads_are_impossible(pair, monkeypatch):
    monkeypatch.setattr(sending, "SETTLE_SECONDS", 0.01)
    sender, _ = pair()
    receiver, name = BareReceiver(), sender.carrier.name
    lead(sender, receiver, "ready")
    sender.transport.abandon(1)
    # The receiver neither reads nor closes: it may be behind a cut cable, and its read under way.
    assert sender.await_event(SendingEnded).error is not None
    assert sender.carrier.log == [f"retired {name}"]
    receiver.close()


def test_the_end_of_a_socket_whose_network_has_failed_is_not_the_end_of_its_receiver(pair, monkeypatch):
    sender, _ = pair()
    receiver, name = BareReceiver(), sender.carrier.name
    lead(sender, receiver, "ready")

    def time_out(*given: Any) -> bytes:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(TransferConnection, "read_message", time_out)
    # As after such an error, the socket reads as closed.
    receiver.close()
    assert sender.await_event(SendingEnded).error is not None
    assert sender.carrier.log == [f"retired {name}"]


def test_units_stay_until_the_receiver_ends_where_reads_cannot_be_made_impossible(pair, monkeypatch):
    monkeypatch.setattr(sending, "SETTLE_SECONDS", 0.01)
    sender, _ = pair()
    sender.carrier.retires = False
    receiver = BareReceiver()
    lead(sender, receiver, "ready")
    sender.transport.abandon(1)
    wait_until(lambda: len(sender.carrier.log) > 3)
    assert not count(sender, SendingEnded)
    receiver.close()
    assert sender.await_event(SendingEnded).error is not None


# bounds and agreement ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answers",
    [
        [TakenMessage(0, 0)],
        [WayMessage(True), WayMessage(True)],
        [WayMessage(True), TakenMessage(7, 0)],
    ],
    ids=["taken before an agreement", "two agreements", "taken and never ready"],
)
def test_a_receiver_that_breaks_the_protocol_ends_the_transfer(pair, answers):
    sender, _ = pair()
    receiver = BareReceiver()
    lead(sender, receiver, "offered")
    for answer in answers:
        receiver.say(answer)
    assert sender.await_event(SendingEnded).error is not None
    receiver.close()


def test_a_confirmation_of_units_that_were_not_taken_is_no_success(pair):
    sender, _ = pair()
    receiver = BareReceiver()
    lead(sender, receiver, "ready")
    receiver.say(ConfirmMessage())
    receiver.close()
    assert "not taken" in sender.await_event(SendingEnded).error


def test_a_receiver_that_pulls_what_was_not_offered_ends_the_transfer(pair):
    sender, _ = pair()
    sender.transport.carriage.carrier, sender.transport.carriage.asked = None, "auto"
    receiver = BareReceiver()
    lead(sender, receiver, "agreed")
    assert "not offered" in sender.await_event(SendingEnded).error
    receiver.close()


def test_metadata_beyond_their_bound_are_refused(pair):
    _, receiver = pair()
    sender = BareSender(receiver)
    with suppress(OSError):
        sender.offer(Introduction("bare", bytes(MAX_METADATA_BYTES + 1)))
    assert sender.connection.hears_end(30)
    assert receiver.carrier.met == []


def test_a_unit_is_read_only_if_that_was_agreed(pair):
    _, receiver = pair(way="auto")
    sender = BareSender(receiver)
    sender.say(CONTRACT.offer(OFFER))
    number = receiver.await_event(Offered).transfer
    receiver.transport.grant(number, 0, 1, False, [place(0, 6)])
    assert sender.hear() == WayMessage(False, "the prefill engine does not offer NIXL")
    assert sender.hear() == GrantMessage(0, 1, False)
    sender.say(sender.ready())
    receiver.await_event(ReceivingEnded)
    assert receiver.carrier.reading == 0


def test_a_unit_that_is_ready_twice_is_read_once(pair):
    _, receiver = pair()
    sender = BareSender(receiver)
    sender.offer()
    number = receiver.await_event(Offered).transfer
    receiver.transport.grant(number, 0, 1, False, [place(0, 6)])
    assert (sender.hear(), sender.hear()) == (WayMessage(True), GrantMessage(0, 1, False))
    sender.say(sender.ready())
    wait_until(lambda: receiver.carrier.reading == 1)
    sender.say(sender.ready())
    receiver.carrier.finish()
    receiver.await_event(ReceivingEnded)
    assert receiver.carrier.log == ["read"]


def test_a_receiver_that_takes_no_unit_owes_one(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("weft.transfer.sending.monotonic", lambda: now[0])
    debt = ReceiverDebt(cells=2)
    debt.granted(2)
    debt.ready()
    debt.ready()
    now[0] = 20.0
    debt.taken(1)
    now[0] = 40.0
    assert not debt.overdue, "it took one 20 seconds ago"
    now[0] = 60.0
    assert debt.overdue
    debt.taken(0)
    now[0] = 100.0
    assert not debt.overdue
