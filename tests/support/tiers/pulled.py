"""Two transports whose units are pulled by fake carriers, and a transfer between them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.tiers.fake_carrier import FakeCarrier
from tests.support.transfer.tcp import OFFER, End, page, place
from weft.base.transfers import Granted, Offered
from weft.memory.kinds import Kind


@pytest.fixture
def pair():
    made: list[End] = []

    def make(held: bool = True, **options: Any) -> tuple[End, End]:
        made.append(End(carrier=FakeCarrier(), **options))
        made.append(End(carrier=FakeCarrier(held), door=True, **options))
        return made[-2], made[-1]

    yield make
    for end in made:
        end.transport.close()


def begin(sender: End, receiver: End, pages: int = 2) -> int:
    """Open a transfer, and let one or two pages be read; return the receiver's number of it."""
    # Not cell 1: the key of its parent is all zeros here, as that of no parent.
    cells = [0, 2][:pages]
    for cell in cells:
        sender.memory[Kind.PAGE][cell] = 10 + cell
    sender.transport.open(1, receiver.place, OFFER)
    offered = receiver.await_event(Offered)
    receiver.transport.grant(offered.transfer, 0, 3, False, [place(cell, 4 + cell) for cell in cells])
    sender.await_event(Granted)
    sender.transport.send(1, [page(cell, cell) for cell in cells])
    return offered.transfer


def take_events(end: End) -> list[Any]:
    end.events += end.transport.poll()
    return end.events


def count(end: End, kind: type) -> int:
    return sum(isinstance(event, kind) for event in take_events(end))
