"""A rolling upgrade, as in docs/fleet.md: the new replica is warmed before it takes requests; the old one drains."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.fleet.fleets import collect
from tests.support.servers.backends import in_loop
from tests.support.servers.fake_engines import answer
from tests.support.servers.fake_members import FakeMember, ask, turns
from tests.support.servers.fleet_processes import SECONDS, Fleet, until
from weft.base.grid import CELL
from weft.engine.load import ReplicaLoad
from weft.engine.protocol import EngineNews
from weft.fleet.backend import FleetBackend
from weft.fleet.member import MemberState
from weft.fleet.remote import ReplicaAddress
from weft.fleet.replicas_file import ReplicasFile, read_replicas
from weft.fleet.routing import RoutedChoice
from weft.fleet.warming import LAST
from weft.memory.journal import CacheChanges, Tier
from weft.memory.keys import PrefixIdentity

OLD, NEW = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"
PROMPT = list(range(2 * CELL))


class HoldingMember(FakeMember):
    """Reports which resume points it holds when a test says so."""

    def report(self, keys: list[bytes]) -> None:
        tokens = tuple(CELL * (place + 1) for place in range(len(keys)))
        count = len(keys)
        changes = CacheChanges(id(self), 0, True, tuple(keys), tokens, bytes([Tier.DEVICE]) * count, b"\1" * count)
        self._receive(EngineNews(changes, ReplicaLoad()))


class Upgrade:
    """A router over fake replicas that follows a file, all driven by hand."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "replicas"
        self.members = {OLD: HoldingMember(), NEW: HoldingMember()}
        self.list(OLD)
        self.choice = RoutedChoice()
        named = [(url, self.members[url]) for url in read_replicas(str(self.file))]
        self.fleet = FleetBackend(named, chooser=self.choice, patient=True, check_seconds=None)
        self.watcher = ReplicasFile(str(self.file), self.fleet, self._connect, drain_seconds=SECONDS)

    def _connect(self, address: ReplicaAddress) -> HoldingMember:
        return self.members[f"tcp://{address.host}:{address.port}"]

    def list(self, *urls: str) -> None:
        self.file.write_text("\n".join(urls))

    async def look(self, *urls: str) -> None:
        self.list(*urls)
        self.watcher.look()
        await turns()

    def states(self) -> dict[str, MemberState]:
        return {member.name: member.state for member in self.fleet.members}

    async def step(self) -> None:
        for member in self.members.values():
            member.step()
        await turns()

    async def finish(self, work: object) -> object:
        task = asyncio.ensure_future(work)
        while not task.done():
            await self.step()
        return await task

    async def tokens(self, prompt: list[int], count: int) -> list[int]:
        async def run() -> list[int]:
            return await collect(await self.fleet.submit(ask(prompt, count)))

        return await self.finish(run())


@in_loop
async def test_a_rolling_upgrade_warms_the_new_replica_drains_the_old_one_and_loses_nothing(tmp_path):
    upgrade = Upgrade(tmp_path)
    old, new = upgrade.members.values()
    await upgrade.fleet.start()
    old.report(PrefixIdentity(CELL).keys(np.array(PROMPT, np.int32)))
    assert await upgrade.tokens([*PROMPT, 7], 3) == answer([*PROMPT, 7], 3)
    begun = await upgrade.finish(upgrade.fleet.submit(ask([20], 30)))
    await upgrade.look(OLD, NEW)
    new.report([])
    await turns()
    assert upgrade.states() == {OLD: MemberState.UP, NEW: MemberState.WARMING}
    # Clients are served by the old replica while the new one computes what they want most.
    assert [(request.prompt.tolist(), request.priority) for request in new.sent] == [([*PROMPT, PROMPT[-1]], LAST)]
    assert await upgrade.tokens([30], 3) == answer([30], 3)
    assert len(new.sent) == 1
    while upgrade.states()[NEW] is MemberState.WARMING:
        await upgrade.step()
    assert upgrade.states() == {OLD: MemberState.UP, NEW: MemberState.UP}
    await upgrade.look(NEW)
    assert upgrade.states()[OLD] is MemberState.DRAINING
    before = len(old.sent)
    assert await upgrade.tokens([40], 3) == answer([40], 3)
    assert len(old.sent) == before, "it gets nothing more"
    assert await upgrade.finish(collect(begun)) == answer([20], 30), "it finishes what it has begun"
    await turns()
    assert upgrade.states() == {NEW: MemberState.UP}
    assert not old.healthy
    await upgrade.fleet.stop(0)


@in_loop
async def test_a_request_that_leaving_replicas_have_not_begun_is_answered_by_the_last_one():
    """However many of them it has been on its way to: that they leave says nothing about the request."""
    members = [FakeMember() for _ in range(5)]
    fleet = FleetBackend([("0", members[0])], patient=True, check_seconds=None)
    await fleet.start()
    await turns()
    answering = asyncio.ensure_future(fleet.submit(ask([20], 5)))
    for place in range(4):
        await turns()
        assert [each.healthy for each in members] == [each == place for each in range(5)]
        # The next one joins while this one has the request, and has not accepted it.
        fleet.add(str(place + 1), members[place + 1])
        await turns()
        fleet.remove(str(place), SECONDS)
    await turns()
    members[4].step()
    await turns()
    collecting = asyncio.ensure_future(collect(await answering))
    while not collecting.done():
        members[4].step()
        await turns()
    assert await collecting == answer([20], 5)
    await fleet.stop(0)


@pytest.mark.slow
def test_a_rolling_upgrade_over_weft_route_with_real_processes(tmp_path):
    asyncio.run(upgrade_for_real(Fleet(tmp_path, replicas=2, routers=1, drain_seconds=SECONDS)))


async def upgrade_for_real(fleet: Fleet) -> None:
    (old, new), [router] = fleet.replicas, fleet.routers
    body = {"prompt": [place % 250 for place in range(200)], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    try:
        fleet.list(old)
        await asyncio.gather(old.start(), router.start())
        await until(lambda: router.are_up(old))
        async with httpx.AsyncClient(base_url=router.url, timeout=SECONDS) as client:
            first = await complete(client, body)
            while (await complete(client, body))[1] < 192:
                pass
            await new.start()
            fleet.list(old, new)
            await until(lambda: router.are_up(old, new))
            stats = await new.ask(lambda backend: backend.stats())
            assert stats["cells"] >= 3, "it was warmed before it was up"
            streaming = asyncio.ensure_future(stream(client, {**body, "max_tokens": 300, "stream": True}))
            await until(lambda: streaming.done() or is_open(router))
            fleet.list(new)
            await until(lambda: router.are_up(new))
            assert (await complete(client, body)) == (first[0], 192), "what was warmed is used"
            assert await streaming == 1, "an answer that was begun has its end, wherever it was"
        assert await new.ask(lambda backend: backend.flush()) == 0
        await old.end(signal.SIGTERM)
        assert old.process.returncode == 0
    finally:
        await fleet.stop()


async def complete(client: httpx.AsyncClient, body: dict[str, object]) -> tuple[str, int]:
    """Return the text of an answer and how many of its prompt's tokens were cached."""
    found = (await client.post("/v1/completions", json=body)).json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


async def stream(client: httpx.AsyncClient, body: dict[str, object]) -> int:
    """Return how many ends the answer has."""
    ends = 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                ends += json.loads(line.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    return ends


async def is_open(router: object) -> bool:
    return any((await router.metric("weft_replica_requests_open")).values())
