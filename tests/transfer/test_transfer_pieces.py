"""Units that travel in pieces over real connections: in order, without gaps, and whole before they count."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tests.support.transfer.tcp import CONTRACT, OFFER, both_ways, page, place, sent_by
from weft.base.copies import UnitPiece
from weft.base.transfers import Granted, Offered, ReceivingEnded, SendingEnded, StagedUnit, UnitReceived, UnitsSent
from weft.memory.kinds import Kind

__all__ = ["both_ways"]


def pieces(*borders: int) -> list[StagedUnit]:
    """A page in pieces between these borders."""
    return [page(2, 5, piece=UnitPiece(*each)) for each in pairwise(borders)]


def test_a_unit_in_pieces_counts_when_all_of_it_has_arrived(both_ways):
    sender, receiver = both_ways()
    size = CONTRACT.unit_bytes[Kind.PAGE]
    sender.memory[Kind.PAGE][5] = np.arange(size) % 251
    sender.transport.open(4, receiver.place, OFFER)
    offered = receiver.await_event(Offered)
    receiver.transport.grant(offered.transfer, 2, 3, False, [place(2, 6)])
    sender.await_event(Granted)
    first, *others = pieces(0, 64, 192, size)
    sender.transport.send(4, [first])
    sender.await_event(UnitsSent)
    # Its memory may be used again at once.
    sender.memory[Kind.PAGE][5][:64] = 255
    assert not [event for event in receiver.transport.poll() if isinstance(event, UnitReceived)]
    sender.transport.send(4, others)
    receiver.await_event(UnitReceived)
    assert (receiver.memory[Kind.PAGE][6] == np.arange(size) % 251).all()
    receiver.transport.confirm(offered.transfer)
    assert sender.await_event(SendingEnded) == SendingEnded(4, None)
    assert sent_by(sender) == [first, *others]


@pytest.mark.parametrize(
    "sent",
    [
        pieces(0, 64) + pieces(128, 192),  # a gap
        pieces(0, 64) + pieces(0, 64),  # repeated
        pieces(64, 128),  # not the beginning
        pieces(0, 128) + pieces(64, 192),  # an overlap
        [*pieces(0, 64), page(2, 5)],  # and then all of it
    ],
    ids=["gap", "repeated", "beginning", "overlap", "whole"],
)
def test_pieces_that_do_not_follow_each_other_end_the_transfer(both_ways, sent):
    sender, receiver = both_ways()
    sender.transport.open(1, receiver.place, OFFER)
    offered = receiver.await_event(Offered)
    receiver.transport.grant(offered.transfer, 2, 3, False, [place(2, 6)])
    sender.await_event(Granted)
    sender.transport.send(1, sent)
    receiver.await_event(ReceivingEnded)
    assert not [event for event in receiver.events if isinstance(event, UnitReceived)]
    assert sender.await_event(SendingEnded).error is not None
