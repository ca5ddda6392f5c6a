"""Peers of a replica's door for routers that do not know the secret, and those that know it and misbehave."""

from __future__ import annotations

import asyncio
import socket

from tests.support.fleet.doors import SECRET, address_of, door, exchange, framed, remote, until
from tests.support.servers.backends import LONG, ask, collect, in_loop, instant, started, tokens_of
from tests.support.servers.fake_engines import answer
from tests.support.servers.held_steps import SECONDS
from weft.backends.codec import FLEET, EngineWriter
from weft.engine.events import FinishReason
from weft.engine.protocol import Question, Submit, Topic
from weft.fleet import listener as listener_module
from weft.fleet.listener import FleetListener
from weft.wire.handshake import Proof, RouterSide

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]

encode_command = EngineWriter().command


async def knock(found: FleetListener, source: str = "127.0.0.1") -> Stream:
    """Connect from an address of this machine and read the replica's first message, but answer nothing."""
    place = address_of(found)
    reader, writer = await asyncio.open_connection(place.host, place.port, local_addr=(source, 0))
    await reader.readexactly(4)
    return reader, writer


async def is_cut(stream: Stream) -> None:
    """Wait until the replica has closed a connection."""
    reader, writer = stream
    async with asyncio.timeout(SECONDS):
        try:
            while await reader.read(1 << 10):
                pass
        except ConnectionResetError:
            pass
    writer.close()


async def authenticate(found: FleetListener) -> Stream:
    place = address_of(found)
    reader, writer = await asyncio.open_connection(place.host, place.port)
    hello = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
    writer.write(RouterSide(SECRET, FLEET).proof(hello))
    await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
    return reader, writer


@in_loop
async def test_one_address_replaces_only_its_own_strangers(monkeypatch):
    monkeypatch.setattr(listener_module, "MAX_STRANGERS_OF_ADDRESS", 2)
    async with started(instant("thread")) as backend, door(backend, handshake_seconds=SECONDS) as found:
        place = address_of(found)
        reader, writer = await asyncio.open_connection(place.host, place.port)
        hello = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
        flood = [await knock(found, "127.0.0.2") for _ in range(6)]
        for stream in flood[:4]:
            await is_cut(stream)
        assert found.strangers == 3
        writer.write(RouterSide(SECRET, FLEET).proof(hello))
        await until(lambda: len(found.routers) == 1)
        for _, each in (*flood, (reader, writer)):
            each.close()


@in_loop
async def test_in_total_the_address_with_most_strangers_gives_way(monkeypatch):
    monkeypatch.setattr(listener_module, "MAX_STRANGERS", 3)
    async with started(instant("thread")) as backend, door(backend, handshake_seconds=SECONDS) as found:
        single = await knock(found, "127.0.0.3")
        pair = [await knock(found, "127.0.0.2") for _ in range(2)]
        late = await knock(found, "127.0.0.4")
        await is_cut(pair[0])
        assert found.strangers == 3
        for _, writer in (single, pair[1], late):
            writer.close()


class Untouched:
    """A backend that no peer may use."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"a stranger's bytes led to {name}")


@in_loop
async def test_nothing_is_done_for_a_peer_without_a_proof(caplog, monkeypatch):
    """Not for commands, a wrong secret, or messages that a router sent before."""
    monkeypatch.setattr(listener_module, "LOG_SECONDS", 1e9)
    async with started(instant("thread")) as backend, door(backend) as real:
        place = address_of(real)
        reader, writer = await asyncio.open_connection(place.host, place.port)
        hello = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
        proof = RouterSide(SECRET, FLEET).proof(hello)
        writer.write(proof)
        await until(lambda: real.routers)
        writer.close()
    recorded = proof + encode_command(Submit(0, ask([20], LONG))) + encode_command(Question(1, Topic.STATS))
    wrong = RouterSide(b"x" * 40, FLEET).proof(hello)
    async with door(Untouched()) as found:
        for data in (
            recorded,
            wrong,
            encode_command(Question(1, Topic.STATS)),
            framed(Proof(4, bytes(32), bytes(32))),
        ):
            assert (await exchange(found, data))[1] == b""
        assert not found.routers
        await until(lambda: found.strangers == 0)
    assert caplog.text.count("refused") == 1, "strangers must not fill the log"


@in_loop
async def test_slow_and_oversized_peers_do_not_stop_the_stream_of_a_router():
    """Strangers that send a byte, routers that send half a frame, too large a frame, or read nothing."""
    async with started(instant("thread", 0.001)) as backend, door(backend) as found, started(remote(found)) as router:
        stream = await router.submit(ask([20], LONG))
        await anext(stream)
        strangers = [await knock(found) for _ in range(8)]
        for _, writer in strangers:
            writer.write(b"\0")
        half, large, mute = [await authenticate(found) for _ in range(3)]
        half[1].write(encode_command(Submit(0, ask([30], LONG)))[:40])
        large[1].write((1 << 31).to_bytes(4, "big"))
        # Its answers are never read.
        mute[1].transport.pause_reading()
        for number in range(20):
            mute[1].write(encode_command(Submit(number, ask([40], LONG))))
        await is_cut(large)
        await until(lambda: backend.open == 21)
        arrived = 0
        async with asyncio.timeout(SECONDS):
            while arrived < 300:
                arrived += len(await anext(stream))
        router.abort(stream)
        assert (await collect(stream))[0][-1].finish is FinishReason.ABORT
        for _, writer in (*strangers, half, mute):
            writer.close()
        mute[1].transport.abort()
        await until(lambda: backend.open == 0)
        assert await tokens_of(router, ask([3], 5)) == answer([3], 5)


@in_loop
async def test_the_kernel_notices_peers_that_vanish_without_a_word():
    async with started(instant("thread")) as backend, door(backend) as found, started(remote(found)) as router:
        ends = [next(iter(found.routers)).transport, router._link._transport]
        for end in (each.get_extra_info("socket") for each in ends):
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle, interval, count = (
                end.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
            )
            assert idle + interval * count <= 30
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
