"""What an operator drops is forgotten by every router: none computes it again to warm a replica."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fleet.doors import bodies_of, door, remote, until
from tests.support.fleet.drops import SALTS, live, prefix
from tests.support.fleet.fleets import fleet_of, prefix_of
from tests.support.hashed.rolling import rolling_spec
from tests.support.servers.backends import collect, in_loop, real, started
from tests.support.servers.fake_members import FakeMember, turns
from weft.backends.backend import Backend
from weft.backends.codec import EngineWriter, EventReader
from weft.base.grid import CELL
from weft.base.sampling import SamplingParams
from weft.base.tenants import Dropped, tenant_digest
from weft.engine.load import ReplicaLoad
from weft.engine.protocol import Drop, EngineNews
from weft.engine.request import Request
from weft.fleet.backend import FleetBackend
from weft.fleet.choosing import LeastOpen
from weft.fleet.member import MemberState
from weft.fleet.routing import RoutedChoice
from weft.memory import journal as journal_module
from weft.memory.journal import CacheChanges, Journal
from weft.memory.ledger import Ledger
from weft.wire.frames import ProtocolError

EXAMPLES = int(os.environ.get("WEFT_EXAMPLES", "60"))


# the stream -----------------------------------------------------------------------------------------------------------


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 1 << 40), loss=st.sampled_from([0.0, 0.2, 0.6]), most=st.sampled_from([1, 2, 16]))
def test_no_router_wants_what_was_dropped_whatever_it_missed(seed, loss, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module, "MOST_DROPS", most)
        live(seed, loss)


def test_a_drop_is_reported_before_changes_that_wait_and_counts_without_a_reader():
    journal = Journal(Ledger(rolling_spec(), 1 << 14, seats=1, max_length=64))
    journal.note_drop(b"t", None)
    assert journal.take() is None, "there is no reader"
    journal.restart()
    for number in range(9):
        journal.note(journal_module.Tier.DEVICE, bytes([number]) * 32, 4, held=True, point=True)
    journal.note_drop(None, b"p")
    first, second = journal.take(4), journal.take(4)
    assert (first.drops, first.dropped) == (2, (Dropped(b"t"), Dropped(None, b"p")))
    assert (second.drops, second.dropped) == (2, ())


def test_drops_survive_the_wire_and_are_bounded():
    changes = CacheChanges(5, 9, False, (), (), b"", b"", 3, (Dropped(b"t" * 16), Dropped(None, b"p" * 32)))
    news = EngineNews(changes, ReplicaLoad())
    assert EventReader().read(bodies_of(EngineWriter().event(news))[0]) == news
    long, many = (Dropped(b"t" * 17, None),), (Dropped(None, None),) * 17
    for drops, dropped in ((9, long), (99, many), (0, many[:1])):
        told = asdict(changes) | {"drops": drops, "dropped": dropped}
        with pytest.raises(ProtocolError):
            EventReader().read(msgspec.msgpack.encode(["news", told, ReplicaLoad()]))


# fleets ---------------------------------------------------------------------------------------------------------------


def ask_for(number: int, salt: bytes = b"") -> Request:
    tokens = (np.arange(2 * CELL + 1, dtype=np.int32) + 7 * number) % 200
    return Request(tokens, SamplingParams(max_tokens=1, temperature=0.0), salt=salt)


@asynccontextmanager
async def routed(*doors: object) -> AsyncIterator[tuple[FleetBackend, RoutedChoice]]:
    choice = RoutedChoice()
    members = [(str(place), remote(each)) for place, each in enumerate(doors)]
    async with started(FleetBackend(members, patient=True, chooser=choice, check_seconds=None)) as fleet:
        await until(lambda: all(member.takes_requests for member in fleet.members))
        yield fleet, choice


async def want(fleet: FleetBackend, choice: RoutedChoice, request: Request) -> None:
    """Send a request until the router has seen that it hits."""
    known = len(choice.wanted())
    while len(choice.wanted()) == known:
        await collect(await fleet.submit(request))


async def computed_prompts(backend: Backend) -> int:
    return int((await backend.stats())["requests"])


@in_loop
async def test_a_drop_through_one_router_is_forgotten_by_the_others():
    """And by one that was not connected when it happened."""
    one, two, new = real("thread"), real("thread"), real("thread")
    async with AsyncExitStack() as stack:
        for backend in (one, two, new):
            await stack.enter_async_context(started(backend))
        doors = [await stack.enter_async_context(door(backend)) for backend in (one, two, new)]
        here, _ = await stack.enter_async_context(routed(*doors[:2]))
        there, choice = await stack.enter_async_context(routed(*doors[:2]))
        mine, theirs = ask_for(1, SALTS[0]), ask_for(2, SALTS[1])
        for request in (mine, theirs):
            await want(there, choice, request)
        await here.drop(tenant_digest(SALTS[0]), None)
        await until(lambda: [each.salt for each in choice.wanted()] == [SALTS[1]])
        there.add("new", remote(doors[2]))
        await until(lambda: len(there.members) == 3 and there.members[2].takes_requests)
        assert await computed_prompts(new) == 1, "only what was not dropped is computed there"
        # A router that lost its connections hears of it from the stream that starts over.
        for found in doors:
            for link in list(found.routers):
                link.abort()
        await one.drop(None, None)
        await until(lambda: all(member.backend.healthy for member in there.members))
        await until(lambda: choice.wanted() == [])


class ReportingMember(FakeMember):
    """Reports a drop to its subscribers when a test says so, and notes what it is asked to drop."""

    def __init__(self) -> None:
        super().__init__()
        self.drops: list[Drop] = []

    def _send(self, command: object) -> None:
        super()._send(command)
        if isinstance(command, Drop):
            self.drops.append(command)

    def report(self, *dropped: Dropped) -> None:
        changes = CacheChanges(id(self), 0, True, (), (), b"", b"", len(dropped), dropped)
        self._receive(EngineNews(changes, ReplicaLoad()))


@in_loop
async def test_a_drop_that_a_member_reports_ends_the_warming_of_what_it_names():
    """What was computed before is dropped at the new member, which the operator's router may not know."""
    choice = RoutedChoice()
    async with fleet_of(1, patient=True, chooser=choice) as fleet:
        old = fleet.members[0] = ReportingMember()
        fleet.backend.members[0].backend = old
        await old.start()
        fleet.backend.members[0].readmit()
        choice.removed(fleet.backend.members[0])
        choice.added(fleet.backend.members[0])
        old.report()
        for place in range(6):
            choice._wanted.note(*prefix(place))
        new = ReportingMember()
        fleet.backend.add("1", new)
        fleet.members.append(new)
        await turns()
        assert (fleet.backend.members[1].state, new.sent) == (MemberState.WARMING, []), "its own drops are heard first"
        new.report(Dropped(None, prefix(5)[0][1]))
        await turns()
        assert len(new.sent) == 1
        first = new.sent[0].salt
        old.report(Dropped(tenant_digest(first)))
        while fleet.backend.members[1].state is MemberState.WARMING:
            await fleet.step()
        assert {request.salt for request in new.sent[1:]} == {salt for salt in SALTS if salt != first}
        known = {key[0] for place in range(6) if (key := prefix(place)[0]) and prefix(place)[2] == first}
        assert [(drop.tenant, drop.prefix in known) for drop in new.drops] == [(None, True)]
        assert all(len(request.prompt) - 1 != len(prefix(5)[1]) or request.salt != prefix(5)[2] for request in new.sent)


@in_loop
async def test_a_router_without_wanted_prefixes_does_not_wait_for_reports():
    async with fleet_of(1, patient=True, chooser=RoutedChoice()) as fleet:
        fleet.backend.add("1", FakeMember())
        await turns()
        assert fleet.backend.members[1].state is MemberState.UP


@in_loop
async def test_a_drop_through_the_router_itself_is_repeated_at_a_member_that_is_being_warmed():
    class Wanting(LeastOpen):
        def wanted(self):
            return [prefix_of([number]) for number in range(5, 9)]

    async with fleet_of(1, patient=True, chooser=Wanting()) as fleet:
        await turns()
        new = ReportingMember()
        fleet.backend.add("1", new)
        fleet.members.append(new)
        await turns()
        dropping = asyncio.ensure_future(fleet.backend.drop(None, None))
        while fleet.backend.members[1].state is MemberState.WARMING or not dropping.done():
            await fleet.step()
        assert {drop.prefix for drop in new.drops} == {None, bytes([5])}, "its first prefix was in flight"
