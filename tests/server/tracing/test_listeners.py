"""The buffer of a client that watches is bounded: what does not fit is counted, and then it begins anew."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.servers.backends import in_loop
from tests.support.servers.fake_members import FakeMember
from weft.engine.protocol import WatchRequests
from weft.engine.tracing.events import Preempted, StepFacts, TraceBatch
from weft.server.tracing import hub
from weft.server.tracing.hub import TraceHub, TraceListener

OWN, OTHER = "aa", "bb"
OPENING = TraceBatch(1.0, opening=True)


def batch_of(*tenants: str, steps: int = 0, **more: Any) -> TraceBatch:
    return TraceBatch(
        2.0, [Preempted("x", each, 2.0) for each in tenants], [StepFacts(2.0, 1.0, 1, 1, 0, 0)] * steps, **more
    )


async def no_pause(seconds: float) -> None:
    await asyncio.sleep(0)


async def next_of(listener: TraceListener, stream: Any) -> dict[str, Any]:
    return dict(json.loads((await anext(stream)).removeprefix(b"data: ")))


async def hub_with(**more: Any) -> tuple[FakeMember, TraceHub]:
    backend = FakeMember()
    await backend.start()
    return backend, TraceHub(backend, sleep=no_pause, **more)


def asked(backend: FakeMember) -> list[bool]:
    return [each.wanted for each in backend.inbox if isinstance(each, WatchRequests)]


@in_loop
async def test_the_engine_notes_only_while_somebody_listens() -> None:
    backend, found = await hub_with()
    assert asked(backend) == []
    one, other = found.listen(OWN, False), found.listen(OTHER, True)
    one.close()
    one.close()
    assert asked(backend) == [True, True]
    other.close()
    assert asked(backend) == [True, True, False]


@in_loop
async def test_events_that_a_client_does_not_read_are_counted_and_it_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "MOST_WAITING", 10)
    backend, found = await hub_with()
    listener = found.listen(OWN, False)
    stream = listener.batches()
    for batch in (OPENING, batch_of(*[OWN] * 8, OTHER), batch_of(*[OWN] * 3, *[OTHER] * 9), batch_of(OWN)):
        backend._receive(batch)
    assert len(listener._waiting) == 2
    first, second = await next_of(listener, stream), await next_of(listener, stream)
    assert (first["opening"], len(second["events"]), second["lost"]) == (True, 8, 4)
    later = asyncio.ensure_future(next_of(listener, stream))
    await asyncio.sleep(0)
    # What runs is asked for again; until it comes, nothing would make sense.
    assert asked(backend) == [True, True]
    backend._receive(batch_of(OWN))
    backend._receive(OPENING)
    assert (await later)["opening"] is True


@in_loop
async def test_a_stream_ends_with_its_engine() -> None:
    backend, found = await hub_with()
    listener = found.listen(OWN, True)
    backend._receive(OPENING)
    backend._receive(batch_of(OTHER, steps=2))
    backend.die()
    messages = [json.loads(each.removeprefix(b"data: ")) async for each in listener.batches()]
    assert [len(each["events"]) for each in messages] == [0, 1]
    assert [len(each["steps"]) for each in messages] == [0, 2]
    # The engine that comes after it is told that somebody listens.
    backend.revive()
    backend._subscribe_again()
    assert asked(backend) == [True]


@in_loop
async def test_only_what_follows_an_opening_is_sent() -> None:
    backend, found = await hub_with()
    listener = found.listen(OWN, False)
    stream = listener.batches()
    for batch in (batch_of(OWN), OPENING, OPENING, batch_of(OTHER), batch_of(OWN, OWN)):
        backend._receive(batch)
    assert [len((await next_of(listener, stream))["events"]) for _ in range(2)] == [0, 2]
    assert listener._waiting == []


@in_loop
async def test_of_a_replica_that_has_ended_all_begins_anew() -> None:
    backend, found = await hub_with()
    listener = found.listen(OWN, False)
    stream = listener.batches()
    named = [TraceBatch(1.0, opening=True, source="0"), batch_of(OWN, source="0"), batch_of(OWN, source="1")]
    for batch in (*named, TraceBatch(3.0, ended=True, source="0"), batch_of(OWN, source="0"), named[0]):
        backend._receive(batch)
    messages = [await next_of(listener, stream) for _ in range(4)]
    assert [(each["source"], each.get("opening", False)) for each in messages] == [
        ("0", True), ("0", False), ("0", True), ("0", True),
    ]  # fmt: skip
