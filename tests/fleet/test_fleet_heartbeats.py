"""A router knows whether the engine behind a replica serves, hangs, has ended or was started again."""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.support.fleet.doors import SECRET, door, remote, until
from tests.support.servers.backends import ask, in_loop, instant, started, tokens_of
from tests.support.servers.fake_engines import answer, fake_info
from weft.backends.codec import FLEET, EngineWriter
from weft.base.errors import EngineStopped
from weft.fleet.remote import RemoteBackend, ReplicaAddress
from weft.wire.handshake import ReplicaSide


@in_loop
async def test_a_replica_whose_engine_hangs_says_so_and_returns_with_it():
    backend = instant("thread")
    async with started(backend), door(backend) as found, started(remote(found, patience_seconds=1.0)) as router:
        assert router.healthy
        backend._silent = True
        await until(lambda: not router.healthy)
        with pytest.raises(EngineStopped, match="does not respond"):
            await router.submit(ask([20], 5))
        backend._silent = False
        await until(lambda: router.healthy)
        assert await tokens_of(router, ask([3], 5)) == answer([3], 5)
        assert len(found.routers) == 1


@in_loop
async def test_a_replica_that_answers_no_heartbeat_is_noticed():
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        side = ReplicaSide(SECRET, FLEET)
        writer.write(side.hello())
        proof = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
        writer.write(side.welcome(proof) + EngineWriter().frame(fake_info()))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    place = ReplicaAddress("127.0.0.1", server.sockets[0].getsockname()[1])
    async with started(RemoteBackend(place, SECRET, patience_seconds=0.05)) as router:
        await until(lambda: not router.healthy)
    server.close()


@in_loop
async def test_an_engine_that_was_started_again_is_connected_to_anew():
    """However long that took; so that the router knows that its cache is empty, and warms it."""
    backend = instant("process", restart=True)
    async with started(backend), door(backend) as found, started(remote(found, patience_seconds=0.2)) as router:
        before = router.info
        os.kill(backend.process_id, 9)
        await until(lambda: router.healthy and router.info is not before)
        assert await tokens_of(router, ask([3], 5)) == answer([3], 5)
