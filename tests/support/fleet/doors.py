"""Doors of replicas for routers, and what peers send through them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from tests.support.servers.held_steps import SECONDS
from weft.backends.backend import Backend
from weft.backends.codec import FLEET
from weft.fleet.listener import FleetDoor, FleetListener
from weft.fleet.remote import RemoteBackend, ReplicaAddress
from weft.wire.frames import Frames
from weft.wire.handshake import (
    HandshakeError,
    Hello,
    Proof,
    ReplicaSide,
    RouterSide,
    Welcome,
)
from weft.wire.versions import VersionError

SECRET = b"a secret of at least thirty-two characters"


@asynccontextmanager
async def door(backend: Backend, **more: object) -> AsyncIterator[FleetListener]:
    settings = {"secret": SECRET} | more
    bound = socket.create_server(("127.0.0.1", 0))
    found = FleetListener(bound, backend, FleetDoor("127.0.0.1", 0, **settings))
    try:
        yield found
    finally:
        await found.close()


def address_of(found: FleetListener) -> ReplicaAddress:
    return ReplicaAddress("127.0.0.1", found._listener.getsockname()[1], found.door.tls is not None)


def remote(found: FleetListener, secret: bytes = SECRET, **more: object) -> RemoteBackend:
    return RemoteBackend(address_of(found), secret, first_pause_seconds=0.01, **more)


async def until(condition: object) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


async def exchange(found: FleetListener, data: bytes) -> tuple[bytes, bytes]:
    """Send bytes after the replica's first message; return that message and all that follows."""
    reader, writer = await asyncio.open_connection(*[address_of(found).host, address_of(found).port])
    hello = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
    writer.write(data)
    try:
        rest = await asyncio.wait_for(reader.read(), SECONDS)
    except ConnectionError:
        rest = b""
    writer.close()
    return hello, rest


def framed(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def bodies_of(data: bytes) -> list[bytes]:
    return Frames().feed(data)


def check_a_mac_is_good_for_one_role_one_channel_and_one_handshake():
    replica, router = ReplicaSide(SECRET, FLEET), RouterSide(SECRET, FLEET)
    [hello] = bodies_of(replica.hello())
    [proof] = bodies_of(router.proof(hello))
    [welcome] = bodies_of(replica.welcome(proof))
    router.check(welcome)
    # Sent back: the router's own proof as the replica's.
    mac = msgspec.msgpack.decode(proof, type=Proof).mac
    with pytest.raises(HandshakeError, match="secret"):
        router.check(msgspec.msgpack.encode(Welcome(mac)))
    # Played again, to another connection.
    with pytest.raises(HandshakeError, match="secret"):
        ReplicaSide(SECRET, FLEET).welcome(proof)
    # Passed on by a party with another certificate.
    here, there = (
        ReplicaSide(SECRET, FLEET, b"certificate of the replica"),
        RouterSide(SECRET, FLEET, b"another certificate"),
    )
    [hello] = bodies_of(here.hello())
    [proof] = bodies_of(there.proof(hello))
    with pytest.raises(HandshakeError, match="channel"):
        here.welcome(proof)
    with pytest.raises(VersionError, match="version 1 of the fleet protocol"):
        there.proof(msgspec.msgpack.encode(Hello(1, bytes(32))))
