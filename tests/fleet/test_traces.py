"""Whoever watches a fleet hears of the requests of all its members, of those that join, and of the end of each."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.support.fleet.doors import door, remote, until
from tests.support.servers.backends import ask, in_loop, real, started, tokens_of
from tests.support.servers.fake_members import FakeMember
from weft.backends.codec import EngineWriter
from weft.base.errors import RequestError
from weft.engine.protocol import Question, Topic, WatchRequests
from weft.engine.tracing.events import Ends, Event, TraceBatch
from weft.fleet.backend import FleetBackend
from weft.fleet.session import RouterSession


@in_loop
async def test_members_are_sources_that_come_and_go() -> None:
    members = [FakeMember() for _ in range(2)]
    fleet = FleetBackend([("0", members[0])], patient=True, check_seconds=None)
    await fleet.start()
    heard: list[TraceBatch | None] = []
    fleet.watch(heard.append)
    fleet.add("1", members[1])
    for member in members:
        await until(lambda member=member: member.starts == 1)
        member._receive(TraceBatch(1.0, opening=True))
    fleet.remove("1", 0)
    await until(lambda: len(fleet.members) == 1)
    fleet.unwatch(heard.append)
    members[0]._receive(TraceBatch(2.0))
    assert [(each.source, each.opening, each.ended) for each in heard if each is not None] == [
        ("0", True, False), ("1", True, False), ("1", False, True),
    ]  # fmt: skip
    await fleet.stop(0)


@in_loop
async def test_a_fleet_that_ends_says_so_once() -> None:
    fleet = FleetBackend([("0", FakeMember())], check_seconds=None)
    await fleet.start()
    heard: list[TraceBatch | None] = []
    fleet.watch(heard.append)
    await fleet.stop(0)
    assert heard[0] is None or heard[-1] is None
    assert all(each is None or each.ended for each in heard)


@in_loop
async def test_a_router_hears_of_a_request_of_its_replica() -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(started(real("thread")))
        listener = await stack.enter_async_context(door(engine))
        router = await stack.enter_async_context(started(remote(listener)))
        heard: list[TraceBatch | None] = []
        router.watch(heard.append)
        answered = await tokens_of(router, ask([1, 2, 3], 5, name="asked"))
        await until(lambda: any(isinstance(event, Ends) for event in events_of(heard)))
        assert {event.id for event in events_of(heard)} == {"asked"}
        assert events_of(heard)[-1].tokens == len(answered)
        assert await router.request_facts("asked") == []


def events_of(batches: list[TraceBatch | None]) -> list[Event]:
    return [event for batch in batches if batch is not None for event in batch.events]


def test_nothing_is_asked_of_a_replica_that_knows_no_events() -> None:
    for command in (WatchRequests(), Question(1, Topic.REQUEST, name="x")):
        assert EngineWriter().command(command)
        with pytest.raises(RequestError, match="reports no requests"):
            EngineWriter(version=5).command(command)
    assert EngineWriter(version=5).command(Question(1, Topic.STATS))


@in_loop
async def test_a_router_that_does_not_read_loses_events_and_begins_anew() -> None:
    backend, sent, unread = FakeMember(), [], [0]
    await backend.start()
    session = RouterSession(backend, sent.append, lambda: unread[0])
    session.receive(WatchRequests())
    backend._receive(TraceBatch(1.0, opening=True))
    unread[0] = 1 << 20
    backend._receive(TraceBatch(1.0, lost=7))
    assert len(sent) == 1
    unread[0] = 0
    session.drained()
    assert [type(each) for each in backend.inbox] == [WatchRequests, WatchRequests]
    backend._receive(TraceBatch(1.0, opening=True))
    assert len(sent) == 2
    session.close()
    assert backend.inbox[-1] == WatchRequests(False)
    await asyncio.sleep(0)
