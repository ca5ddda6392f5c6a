"""Bodies that are never complete: all of them together have a bound, and slow clients make room for others."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse

from tests.support.servers.asgi import Exchange, application
from tests.support.servers.backends import in_loop
from tests.support.servers.held_steps import SECONDS, wait_until
from tests.support.servers.wire_server import LOOPS, json_of, post, receive_until, wire_server
from weft.base.errors import RequestError
from weft.server.access.auth import Tenant
from weft.server.app import ROUTES
from weft.server.http.exchange import HttpExchange
from weft.server.http.receiving import FREE_BYTES, NO_ROOM, PATIENCE_SECONDS, WINDOW_SECONDS, Receiving
from weft.server.settings import Limits

BOUND = 1 << 20
LIMITS = Limits(receiving_bytes=BOUND, body_bytes=4 << 20)
PART = b"x" * (1 << 16)
ALICE, BOB = Tenant(b"alice"), Tenant(b"bob")


class Time:
    """A clock that stands still until a test moves it, and windows that end when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.windows: list[asyncio.Timeout] = []

    def clock(self) -> float:
        return self.now

    def timeout(self, seconds: float) -> asyncio.Timeout:
        assert 0 <= seconds <= WINDOW_SECONDS
        self.windows.append(asyncio.timeout(None))
        return self.windows[-1]

    async def window_ends(self, client: Client) -> None:
        """End the last window that began, and wait for the next one or the end of the body."""
        count = len(self.windows)
        self.windows[-1].reschedule(asyncio.get_running_loop().time())
        while len(self.windows) == count and not client.body.done():
            await asyncio.sleep(0)


class Client:
    """A client that sends a part of its body at a time."""

    def __init__(self, receiving: Receiving, tenant: Tenant | None = None, address: str = "9.9.9.9") -> None:
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope = {"type": "http", "headers": [], "client": (address, 1), "state": {"tenant": tenant}}
        self.body = asyncio.ensure_future(receiving.read_body(Request(scope, self._sent.get)))
        # Not every test looks at every refusal.
        self.body.add_done_callback(lambda body: body.cancelled() or body.exception())

    async def send(self, size: int, more: bool = True) -> None:
        for start in range(0, size, len(PART)):
            part = PART[: size - start]
            self._sent.put_nowait({"type": "http.request", "body": part, "more_body": more or start + len(part) < size})
        await self._settle()

    async def leave(self) -> None:
        self._sent.put_nowait({"type": "http.disconnect"})
        await self._settle()

    async def _settle(self) -> None:
        while not self._sent.empty() and not self.body.done():
            await asyncio.sleep(0)
        for _ in range(4):
            await asyncio.sleep(0)

    @property
    def refused(self) -> int | None:
        """The status of its refusal, if it has one."""
        error = self.body.exception() if self.body.done() else None
        return error.status if isinstance(error, RequestError) else None


def made() -> tuple[Receiving, Time]:
    time = Time()
    return Receiving(LIMITS, clock=time.clock, timeout=time.timeout), time


@in_loop
async def test_a_body_arrives_and_leaves_nothing_counted():
    receiving, _ = made()
    client = Client(receiving)
    await client.send(200_000)
    assert receiving.held_bytes == 200_000 - FREE_BYTES
    await client.send(100_000, more=False)
    assert len(await client.body) == 300_000
    assert receiving.held_bytes == 0


@in_loop
async def test_unfinished_bodies_have_a_bound_in_total_and_return_it_when_their_clients_vanish():
    receiving, _ = made()
    clients = [Client(receiving) for _ in range(64)]
    for client in clients:
        await client.send(BOUND // 4)
        assert receiving.held_bytes <= BOUND
    assert receiving.held_bytes > BOUND // 2
    assert {client.refused for client in clients} == {None, 503}
    for client in clients:
        await client.leave()
    assert receiving.held_bytes == 0
    assert all(isinstance(client.body.exception(), RequestError | ClientDisconnect) for client in clients)


@in_loop
async def test_a_small_body_is_never_refused():
    receiving, _ = made()
    hogs = [Client(receiving) for _ in range(8)]
    for hog in hogs:
        await hog.send(BOUND // 4)
    for _ in range(100):
        small = Client(receiving)
        await small.send(FREE_BYTES // 2)
        await small.send(FREE_BYTES // 2, more=False)
        assert len(await small.body) == FREE_BYTES


@pytest.mark.parametrize(
    ("hog", "other"),
    [
        ({"tenant": ALICE}, {"tenant": BOB}),
        ({"address": "9.9.9.9"}, {"address": "8.8.8.8"}),
        ({"tenant": ALICE, "address": "9.9.9.9"}, {"tenant": ALICE, "address": "8.8.8.8"}),
        ({"address": "2001:db8::1"}, {"address": "2001:db8:0:1::1"}),
    ],
    ids=["keys", "addresses", "addresses of a key", "networks"],
)
@in_loop
async def test_who_holds_most_makes_room_for_another_key_or_address(hog, other):
    receiving, _ = made()
    hogs = [Client(receiving, **hog) for _ in range(8)]
    for each in hogs:
        await each.send(BOUND // 8)
    newcomer = Client(receiving, **other)
    await newcomer.send(BOUND // 2)
    assert newcomer.refused is None
    assert [each.refused for each in hogs].count(503) in (4, 5)
    # It gets no more than its half.
    await newcomer.send(BOUND // 4)
    assert newcomer.refused == 503
    assert receiving.held_bytes <= BOUND


@in_loop
async def test_many_addresses_of_one_key_have_one_share():
    receiving, _ = made()
    hogs = [Client(receiving, ALICE, f"9.9.9.{number}") for number in range(16)]
    for hog in hogs:
        await hog.send(BOUND // 16 + FREE_BYTES)
    newcomer = Client(receiving, BOB)
    await newcomer.send(BOUND // 2)
    assert newcomer.refused is None


@in_loop
async def test_a_slow_body_makes_room_for_one_of_the_same_client():
    receiving, time = made()
    slow, first = Client(receiving), Client(receiving)
    await slow.send(BOUND // 2)
    await first.send(BOUND // 2)
    second = Client(receiving)
    await second.send(BOUND // 4)
    # None has taken long: the newest is refused, so that others come to their end.
    assert [slow.refused, first.refused, second.refused] == [None, None, 503]
    time.now += PATIENCE_SECONDS + 1
    third = Client(receiving)
    await third.send(BOUND // 4)
    assert [slow.refused, first.refused, third.refused] == [503, None, None]
    with pytest.raises(RequestError, match=NO_ROOM):
        await slow.body


@in_loop
async def test_a_body_must_arrive_at_a_least_rate():
    receiving, time = made()
    client = Client(receiving)
    least = int(LIMITS.body_rate * WINDOW_SECONDS)
    for _ in range(5):
        await client.send(least)
        time.now += WINDOW_SECONDS
        await time.window_ends(client)
    await client.send(least - 1)
    time.now += WINDOW_SECONDS
    await time.window_ends(client)
    with pytest.raises(RequestError, match="too slowly: at least 1024 bytes a second") as raised:
        await client.body
    assert raised.value.status == 408
    assert receiving.held_bytes == 0


@in_loop
async def test_a_body_that_is_fast_enough_is_late_in_all():
    receiving, time = made()
    client = Client(receiving)
    await client.send(100_000)
    time.now += LIMITS.body_seconds - WINDOW_SECONDS / 2
    await time.window_ends(client)
    await client.send(100_000)
    await time.window_ends(client)
    with pytest.raises(RequestError, match="took more than 300 seconds"):
        await client.body


class Spooled(Client):
    """A client whose body is passed on as it arrives."""

    def __init__(self, receiving: Receiving, most: int) -> None:
        self._sent = asyncio.Queue()
        self.written = 0
        request = Request({"type": "http", "headers": [], "client": ("9.9.9.9", 1)}, self._sent.get)
        self.body = asyncio.ensure_future(receiving.spool(request, self._write, most))
        self.body.add_done_callback(lambda body: body.cancelled() or body.exception())

    async def _write(self, piece: bytes) -> None:
        self.written += len(piece)


@in_loop
async def test_a_body_that_is_passed_on_is_not_held_and_has_bounds_of_its_own():
    receiving, time = made()
    client = Spooled(receiving, 3 * BOUND)
    await client.send(2 * BOUND)
    assert (receiving.held_bytes, client.written) == (0, 2 * BOUND)
    await client.send(BOUND, more=False)
    await client.body
    large = Spooled(receiving, 3 * BOUND)
    await large.send(3 * BOUND + 1)
    assert (large.refused, large.written <= 3 * BOUND) == (413, True)
    silent = Spooled(receiving, BOUND)
    await silent.send(1000)
    await time.window_ends(silent)
    assert silent.refused == 408
    slow = Spooled(receiving, BOUND)
    for _ in range(2):
        time.now += WINDOW_SECONDS
        await slow.send(1000)
    assert slow.refused == 408


# every way in ---------------------------------------------------------------------------------------------------------

# They take no body.
BODILESS = {"/flush_cache", "/ping"}


@pytest.mark.parametrize("path", [path for path, method, _ in ROUTES if method == "POST" and path not in BODILESS])
def test_every_route_with_a_body_receives_it_here(path, monkeypatch):
    async def refuse(self: Receiving, request: Request) -> bytes:
        raise RequestError("received here", 418)

    monkeypatch.setattr(Receiving, "read_body", refuse)

    async def ask() -> Exchange:
        async with application() as app:
            return await Exchange(app, path, {"prompt": [1]}).answer()

    assert asyncio.run(ask()).status == 418


@pytest.fixture(params=LOOPS)
def loop(request) -> Iterator[str]:
    return request.param


def test_others_are_served_while_bodies_do_not_end(loop):
    limits = Limits(receiving_bytes=4 << 20, body_bytes=2 << 20)
    with wire_server(limits, loop) as server:
        receiving = server.app.receiving
        slow = [server.connect() for _ in range(32)]
        begun = post("/", b"x" * (1 << 20))[:-1]
        for wire in slow:
            wire.sendall(begun)
        # 32 MiB were sent. Most of these clients have an answer, the others are waited for.
        wait_until(lambda: server.call(lambda: receiving.held_bytes) > limits.receiving_bytes // 2)
        assert server.call(lambda: receiving.held_bytes) <= limits.receiving_bytes
        small = server.ask(post("/", b"y" * 10_000, "Connection: close"))
        assert json_of(small)["body"] == "y" * 10_000
        refused = next(wire for wire in slow if is_answered(wire))
        answer = receive_until(refused, b"}}")
        assert b" 503 " in answer
        assert b"\r\nretry-after: 1\r\n" in answer
        for wire in slow:
            wire.close()
        wait_until(lambda: server.call(lambda: receiving.held_bytes) == 0)
        large = server.ask(post("/", b"z" * (2 << 20), "Connection: close"))
        assert len(json_of(large)["body"]) == 2 << 20


def is_answered(wire: Any) -> bool:
    wire.setblocking(False)
    try:
        return bool(wire.recv(1, 2))  # MSG_PEEK
    except BlockingIOError:
        return False
    finally:
        wire.settimeout(SECONDS)


class Silent:
    """A connection that takes everything."""

    write_paused = False
    default_headers = ()

    def write(self, data: bytes) -> None: ...

    def answered(self) -> None: ...


@pytest.mark.parametrize("end", ["left", "answered"])
@in_loop
async def test_what_was_not_read_of_a_body_goes_with_the_end_of_its_request(end):
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/"}
    exchange = HttpExchange(Silent(), scope, PlainTextResponse("early", 401), True, False)
    exchange.feed(PART)
    assert len(exchange.body) == len(PART)
    await exchange.run() if end == "answered" else exchange.leave()
    assert exchange.body == b""


# memory ---------------------------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, resource
from pathlib import Path
from starlette.requests import Request
from weft.server.http.receiving import Receiving
from weft.server.settings import Limits

CLIENTS, PARTS, PART = 96, 14, 1 << 16

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

async def main():
    receiving, left, kept, sent = Receiving(Limits()), asyncio.Event(), [], []
    async def client():
        parts = PARTS
        async def receive():
            nonlocal parts
            if not parts:
                sent.append(1)
                await left.wait()
                return {"type": "http.disconnect"}
            parts -= 1
            # Small things that stay, between the large ones.
            kept.append(bytes(700))
            await asyncio.sleep(0)
            return {"type": "http.request", "body": bytes(bytearray(PART)), "more_body": True}
        await receiving.read_body(Request({"type": "http", "headers": [], "client": None}, receive))
    before = resident()
    tasks = [asyncio.ensure_future(client()) for _ in range(CLIENTS)]
    while len(sent) < CLIENTS:
        await asyncio.sleep(0)
    full = resident()
    left.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()
    loop = asyncio.get_running_loop()
    while loop._scheduled:
        await asyncio.sleep(0.01)
    print(before, full, resident(), CLIENTS * PARTS * PART)

asyncio.run(main())
"""


def test_memory_of_bodies_goes_back_to_the_system():
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=os.environ, timeout=SECONDS
    )
    before, full, after, sent = map(int, found.stdout.split())
    assert full - before > sent * 3 // 4
    assert after - before < sent // 8
