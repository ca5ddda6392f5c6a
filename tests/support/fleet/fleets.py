"""Fleets of fake members."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from tests.support.servers.backends import in_loop
from tests.support.servers.fake_engines import answer
from tests.support.servers.fake_members import Clock, FakeMember, ask, turns
from weft.backends.output_stream import OutputStream
from weft.engine.events import FinishReason
from weft.engine.request import Request
from weft.fleet.backend import FleetBackend
from weft.fleet.warming import WantedPrefix


class Fleet:
    """Two fake members that a test drives by hand."""

    def __init__(self, size: int = 2, **more: object) -> None:
        self.members = [FakeMember() for _ in range(size)]
        self.clock = Clock()
        named = [(str(place), member) for place, member in enumerate(self.members)]
        self.backend = FleetBackend(named, clock=self.clock, check_seconds=None, **more)

    def holder(self, stream: OutputStream) -> FakeMember:
        return self.members[int(stream.member.name)]

    def other(self, member: FakeMember) -> FakeMember:
        return next(each for each in self.members if each is not member)

    async def submit(self, *args: object) -> OutputStream:
        return await self.submit_request(ask(*args))

    async def submit_request(self, request: Request) -> OutputStream:
        """Submit while all members step once."""
        task = asyncio.ensure_future(self.backend.submit(request))
        await turns()
        await self.step()
        return await task

    async def step(self) -> None:
        for member in self.members:
            member.step()
        await turns()

    async def finish(self, task: asyncio.Task) -> object:
        while not task.done():
            await self.step()
        return await task


@asynccontextmanager
async def fleet_of(size: int = 2, **more: object) -> AsyncIterator[Fleet]:
    fleet = Fleet(size, **more)
    await fleet.backend.start()
    try:
        yield fleet
    finally:
        await fleet.backend.stop(0)


async def collect(stream: OutputStream) -> list[int]:
    return [output.token async for batch in stream for output in batch if output.token is not None]


def prefix_of(tokens: list[int], salt: bytes = b"") -> WantedPrefix:
    return WantedPrefix((bytes(tokens),), np.array(tokens, np.int32), salt)


@in_loop
async def check_a_silent_member_gives_up_what_it_has_not_begun():
    async with fleet_of() as fleet:
        begun = await fleet.submit([20], 9)
        holder = fleet.holder(begun)
        holder.hanging = True
        tasks = [asyncio.ensure_future(fleet.backend.submit(ask([30], 3))) for _ in range(4)]
        await turns()
        holder.sick = True
        fleet.backend.check()
        for task in tasks:
            stream = await fleet.finish(task)
            assert fleet.holder(stream) is not holder
            assert await fleet.finish(asyncio.ensure_future(collect(stream))) == answer([30], 3)
        holder.revive()
        assert await fleet.finish(asyncio.ensure_future(collect(begun))) == answer([20], 9)
        assert [member.open for member in fleet.members] == [0, 0]


@in_loop
async def check_aborts_and_stops_reach_the_member_that_has_the_request():
    async with fleet_of() as fleet:
        one, other = await fleet.submit([1], 50), await fleet.submit([2], 50)
        holder = fleet.holder(other)
        fleet.backend.abort(one)
        fleet.backend.finish(other)
        await fleet.step()
        assert [len(member.aborted) for member in (holder, fleet.other(holder))] == [0, 1]
        assert [batch[-1].finish async for batch in one] == [FinishReason.ABORT]
        assert [batch[-1].finish async for batch in other] == [FinishReason.STOP]
        assert fleet.backend.open == 0
