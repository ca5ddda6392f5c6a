"""Transfers of several ranks as one: what happens counts when all ranks have it, and one rank's end ends all."""

from __future__ import annotations

from dataclasses import replace

import pytest

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
    UnitReceived,
    UnitsSent,
)
from weft.transfer.group import GroupTransport

OFFER = Offer((b"a" * 32, b"b" * 32), b"t" * 16)
THERE = Destination("there", 7000, further_ports=(7001,))
UNITS = [StagedUnit(place, "page", place, OFFER.keys[place], None, 64, b"t" * 16) for place in range(2)]
PLACES = [ReservedUnit(0, "page", 3, OFFER.keys[0], None, 64)]


class FakeEnd:
    """One rank's transport: records calls, and reports the events that a test gives it."""

    send_seconds = 1.0
    send_bytes_per_second = 2.0

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.events: list[TransferEvent] = []
        self.wake = lambda: None

    def __getattr__(self, name: str):
        return lambda *arguments: self.calls.append((name, *arguments))

    def poll(self) -> list[TransferEvent]:
        found, self.events = self.events, []
        return found


@pytest.fixture
def ends() -> list[FakeEnd]:
    return [FakeEnd(), FakeEnd()]


@pytest.fixture
def group(ends) -> GroupTransport:
    return GroupTransport(ends)


def happen(group: GroupTransport, *events: TransferEvent | None) -> list[TransferEvent]:
    """Let every rank report its event, or nothing, and return what the engine sees of it."""
    for end, event in zip(group.ends, events, strict=True):
        end.events += [] if event is None else [event]
    return group.poll()


def both(group: GroupTransport, event: TransferEvent) -> list[TransferEvent]:
    """The events that the engine sees when both ranks report one, and that it sees none of them after the first."""
    assert happen(group, event, None) == []
    return happen(group, None, event)


# Sending --------------------------------------------------------------------------------------------------------------


def test_every_rank_sends_to_its_peer_and_all_offers_have_one_group(group, ends):
    group.open(4, THERE, OFFER)
    group.open(5, THERE, OFFER)
    offers = [[call[3] for call in end.calls] for end in ends]
    assert [[call[2] for call in end.calls] for end in ends] == [
        [Destination("there", 7000)] * 2,
        [Destination("there", 7001)] * 2,
    ]
    assert offers[0] == offers[1]
    assert offers[0][0].group != offers[0][1].group
    assert [replace(offer, group=b"") for offer in offers[0]] == [OFFER, OFFER]


def test_a_receiver_with_another_number_of_ranks_is_refused_by_name(group, ends):
    group.open(4, Destination("there", 7000), OFFER)
    error = "the decode engine has 1 tensor-parallel ranks, but this one has 2"
    assert group.poll() == [SendingEnded(4, error)]
    assert ends[0].calls == ends[1].calls == []


def test_grants_sent_units_and_confirmations_count_when_all_ranks_have_them(group, ends):
    group.open(4, THERE, OFFER)
    assert both(group, Granted(4, 0, 2, True)) == [Granted(4, 0, 2, True)]
    group.send(4, UNITS)
    group.finish(4)
    assert all(end.calls[1:] == [("send", 4, UNITS), ("finish", 4)] for end in ends)
    # The memory of a unit is used again on all ranks, so the slowest decides.
    assert happen(group, UnitsSent(4, (UNITS[0],)), None) == []
    assert happen(group, UnitsSent(4, (UNITS[1],)), UnitsSent(4, (UNITS[0],))) == [UnitsSent(4, (UNITS[0],))]
    assert happen(group, None, UnitsSent(4, (UNITS[1],))) == [UnitsSent(4, (UNITS[1],))]
    assert both(group, SendingEnded(4, None)) == [SendingEnded(4, None)]


def test_one_rank_that_fails_ends_the_transfer_when_no_rank_sends_any_more(group, ends):
    group.open(4, THERE, OFFER)
    assert happen(group, None, SendingEnded(4, "broken")) == []
    assert ("abandon", 4) in ends[0].calls
    assert happen(group, SendingEnded(4, "abandoned"), None) == [SendingEnded(4, "broken")]


def test_a_rank_that_fails_after_another_was_confirmed_is_a_failure(group):
    group.open(4, THERE, OFFER)
    assert happen(group, SendingEnded(4, None), SendingEnded(4, "broken")) == [SendingEnded(4, "broken")]


def test_ranks_that_are_granted_different_units_end_the_transfer(group, ends):
    group.open(4, THERE, OFFER)
    assert happen(group, Granted(4, 0, 1, False), Granted(4, 0, 2, False)) == []
    assert all(("abandon", 4) in end.calls for end in ends)


# Receiving ------------------------------------------------------------------------------------------------------------


def offered(number: int, group: bytes = b"g" * 16, **changes: object) -> Offered:
    return Offered(number, replace(OFFER, group=group, **changes))


def test_offers_of_one_group_are_one_transfer_whatever_their_numbers_and_order(group, ends):
    assert happen(group, offered(1, b"g" * 16), offered(8, b"h" * 16)) == []
    first, second = happen(group, offered(2, b"h" * 16), offered(9, b"g" * 16))
    assert (first.offer.group, second.offer.group) == (b"h" * 16, b"g" * 16)
    group.grant(first.transfer, 0, 1, False, PLACES)
    group.confirm(second.transfer)
    assert [end.calls for end in ends] == [
        [("grant", 2, 0, 1, False, PLACES), ("confirm", 1)],
        [("grant", 8, 0, 1, False, PLACES), ("confirm", 9)],
    ]


def test_a_unit_has_arrived_when_all_ranks_have_it(group):
    [event] = happen(group, offered(1), offered(2))
    assert happen(group, UnitReceived(1, 0), UnitReceived(2, 1)) == []
    assert happen(group, UnitReceived(1, 1), None) == [UnitReceived(event.transfer, 1)]
    assert happen(group, None, UnitReceived(2, 0)) == [UnitReceived(event.transfer, 0)]


def test_a_connection_that_ends_is_refused_on_all_ranks_and_memory_is_kept_until_all_have_ended(group, ends):
    [event] = happen(group, offered(1), offered(2))
    assert happen(group, None, ReceivingEnded(2)) == []
    assert ends[0].calls == [("refuse", 1, "the connection of rank 1 has ended")]
    assert happen(group, ReceivingEnded(1), None) == [ReceivingEnded(event.transfer)]
    assert happen(group, None, UnitReceived(2, 0)) == []


def test_connections_that_end_after_the_confirmation_are_no_failure(group, ends):
    [event] = happen(group, offered(1), offered(2))
    group.confirm(event.transfer)
    assert happen(group, ReceivingEnded(1), None) == []
    assert ends[1].calls == [("confirm", 2)]
    assert happen(group, None, ReceivingEnded(2)) == [ReceivingEnded(event.transfer)]


def test_ranks_that_offer_different_prefixes_are_refused(group, ends):
    assert happen(group, offered(1), offered(2, keys=OFFER.keys[:1])) == []
    assert [[call[:2] for call in end.calls] for end in ends] == [[("refuse", 1)], [("refuse", 2)]]


def test_an_offer_that_comes_to_one_rank_only_is_forgotten_with_its_connection(group, ends):
    assert happen(group, offered(1), None) == []
    assert happen(group, offered(3), None) == []
    assert ends[0].calls == [("refuse", 3, "another offer of this rank has the same group")]
    assert happen(group, ReceivingEnded(1), None) == []
    # The peer's offer would wait for ever.
    assert happen(group, None, offered(2)) == []
    assert happen(group, offered(4), None) != []


def test_an_event_of_any_rank_wakes_the_engine_once_until_it_polls(group, ends):
    rung = []
    group.wake = lambda: rung.append(True)
    for end in ends:
        end.wake()
        end.wake()
        assert len(rung) == 1
        rung.clear()
        group.poll()
