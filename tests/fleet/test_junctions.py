"""The router knows several caches. It tells an engine where a prompt parts from what the others have computed."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np

from tests.support.fleet.fleets import fleet_of
from tests.support.servers.backends import in_loop
from tests.support.servers.fake_members import FakeMember, turns
from weft.base.grid import CELL
from weft.base.sampling import SamplingParams
from weft.engine.load import ReplicaLoad
from weft.engine.protocol import EngineNews
from weft.engine.request import Request
from weft.fleet.routing import RoutedChoice
from weft.memory.journal import CacheChanges, Tier
from weft.memory.keys import PrefixIdentity

STEM = np.arange(3 * CELL, dtype=np.int32) % 50


def with_stem(first: int, salt: bytes = b"") -> Request:
    prompt = np.concatenate([STEM, np.arange(first, first + CELL, dtype=np.int32)])
    return Request(prompt, SamplingParams(max_tokens=1, temperature=0.0), salt=salt, boundaries=(10,))


def computed(prompt: Request, tier: Tier = Tier.PAGE) -> EngineNews:
    """The news of an engine that has the pages of a prompt, and no state, or states at each."""
    keys = PrefixIdentity(CELL, prompt.salt).keys(prompt.prompt)
    lengths = tuple(CELL * (place + 1) for place in range(len(keys)))
    changes = CacheChanges(1, 0, True, tuple(keys), lengths, bytes([tier] * len(keys)), b"\1" * len(keys))
    return EngineNews(changes, ReplicaLoad(token_seconds=0.001))


async def sent_to(member: FakeMember, fleet, request: Request) -> Request:
    """Send a request where the other member is full, and return it as the member got it."""
    fleet.other(member).full = True
    sending = asyncio.ensure_future(fleet.backend.submit(request))
    for _ in range(4):
        await fleet.step()
        await turns()
    await sending
    return member.accepted.pop()


@in_loop
async def test_a_member_is_told_where_a_prompt_parts_from_what_another_one_has_computed():
    async with fleet_of(2, chooser=RoutedChoice()) as fleet:
        holder, member = fleet.members
        holder._receive(computed(with_stem(1000)))
        assert (await sent_to(member, fleet, with_stem(2000))).boundaries == (10, 3 * CELL)


@in_loop
async def test_a_fork_goes_where_its_past_is():
    """Both members have its prompt, and one of them the answer, under the keys of a prompt that goes on with it."""
    async with fleet_of(2, chooser=RoutedChoice()) as fleet:
        forked = msgspec.structs.replace(with_stem(1000), answered=np.arange(2 * CELL, dtype=np.int32))
        past = Request(forked.known, forked.params)
        for place, member in enumerate(fleet.members):
            member._receive(computed(past if place else forked, Tier.DEVICE))
        for _ in range(3):
            assert fleet.holder(await fleet.submit_request(forked)) is fleet.members[1]


@in_loop
async def test_a_member_is_told_nothing_of_what_other_tenants_have_computed():
    async with fleet_of(2, chooser=RoutedChoice()) as fleet:
        holder, member = fleet.members
        holder._receive(computed(with_stem(1000, b"tenant")))
        request = with_stem(2000)
        assert await sent_to(member, fleet, request) is request
