"""Clients that send or read slowly, or not at all: every state of a connection ends, and others are still answered."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import tracemalloc
from dataclasses import replace

import httpx
import pytest
import trustme
from starlette.requests import Request

from tests.support.servers.held_steps import SECONDS, wait_until
from tests.support.servers.http_server import Served, serving
from tests.support.servers.patience import PATIENT
from tests.support.servers.wire_server import (
    LOOPS,
    WireServer,
    drip_until_closed,
    get,
    json_of,
    post,
    receive_until,
    rest_of,
    wire_server,
)
from weft.server.http.protocol import State
from weft.server.http.receiving import Receiving
from weft.server.settings import Limits, ServerSettings

BEGUN = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
LENGTH = b"Content-Length: 50000\r\n"
KEY = b"Authorization: Bearer secret\r\n"


def hurried(**limits: float) -> Limits:
    return replace(PATIENT, **limits)


@pytest.fixture(scope="module")
def server():
    with serving(ServerSettings(api_keys=("secret",), limits=hurried(linger_seconds=0.5))) as found:
        yield found


@pytest.fixture(scope="module")
def hurried_server():
    limits = hurried(header_seconds=0.5, body_seconds=0.5, linger_seconds=0.5)
    with serving(ServerSettings(api_keys=("secret",), limits=limits)) as found:
        yield found


@pytest.mark.parametrize(
    ("status", "sent"),
    [
        (401, BEGUN + LENGTH + b"\r\n"),
        (401, BEGUN + b"Transfer-Encoding: chunked\r\n\r\n"),
        (404, BEGUN.replace(b"completions", b"nothing") + KEY + LENGTH + b"\r\n"),
        (413, BEGUN + KEY + b"Content-Length: 500000\r\n\r\n"),
        (431, BEGUN + b"x: " + b"x" * 5000),
        (400, b"nonsense\r\n\r\n"),
    ],
)
def test_a_client_that_drips_after_an_early_answer_loses_its_connection(server, status, sent):
    check_dripping(server, status, sent)


@pytest.mark.parametrize("sent", [BEGUN, BEGUN + KEY + LENGTH + b"\r\n"])
def test_a_client_that_drips_after_it_was_late_loses_its_connection(hurried_server, sent):
    check_dripping(hurried_server, 408, sent)


def check_dripping(server: Served, status: int, sent: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=300) as wire:
        wire.sendall(sent)
        assert receive_until(wire, b"\r\n").startswith(b"HTTP/1.1 %d " % status)
        drip_until_closed(wire)

    def is_served() -> bool:
        try:
            return server.client.get("/v1/models").status_code == 200
        except httpx.TransportError:
            return False

    # On a busy machine this client may be late too.
    wait_until(is_served)


def test_a_body_in_very_many_parts_takes_no_more_memory_than_in_few():
    parts = 30_000

    async def receive() -> dict[str, object]:
        nonlocal parts
        parts -= 1
        return {"type": "http.request", "body": bytes(bytearray(b"xy")), "more_body": parts > 0}

    request = Request({"type": "http", "headers": []}, receive)
    tracemalloc.start()
    try:
        body = asyncio.run(Receiving(Limits()).read_body(request))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert body == b"xy" * 30_000
    assert peak < 5 * len(body)


# one deadline at a time, on both event loops --------------------------------------------------------------------------


@pytest.fixture(params=LOOPS)
def loop(request):
    return request.param


def test_a_head_that_drips_is_late_in_all(loop):
    with wire_server(hurried(header_seconds=0.3, linger_seconds=0.1), loop) as server, server.connect() as wire:
        wire.sendall(b"GET / HTTP/1.1\r\nx: ")
        drip_until_closed(wire)


def test_a_body_that_drips_is_late_in_all(loop):
    for framing in ("Content-Length: 50000", "Transfer-Encoding: chunked"):
        with wire_server(hurried(body_seconds=0.3, linger_seconds=0.1), loop) as server, server.connect() as wire:
            wire.sendall(f"POST / HTTP/1.1\r\nHost: localhost\r\n{framing}\r\n\r\n".encode())
            drip_until_closed(wire, b"1\r\nx\r\n" if "chunked" in framing else b"x")


def test_the_rest_of_an_unread_body_is_bounded_in_time(loop):
    with wire_server(hurried(linger_seconds=0.3), loop) as server, server.connect() as wire:
        wire.sendall(post("/early", b"x" * 50000)[:-40000])
        assert b" 401 " in receive_until(wire, b"\r\n")
        drip_until_closed(wire)


def test_the_rest_of_an_unread_body_is_bounded_in_bytes(loop):
    with wire_server(hurried(linger_bytes=1 << 16), loop) as server, server.connect() as wire:
        wire.sendall(b"POST /early HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n")
        assert b" 401 " in receive_until(wire, b"\r\n")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            wire.sendall(b"x" * 100_000_000)


def test_a_connection_without_requests_is_closed_though_line_ends_drip(loop):
    with wire_server(hurried(idle_seconds=0.3), loop) as server, server.connect() as wire:
        wire.sendall(get())
        assert b" 200 " in receive_until(wire, b"}}")
        drip_until_closed(wire, b"\r\n")


def test_a_client_that_takes_no_answer_is_cut_off(loop):
    with wire_server(hurried(stall_seconds=0.3), loop) as server, server.connect() as wire:
        wire.sendall(get("/endless"))
        wait_until(lambda: server.app.ended == ["/endless"])
        wait_until(lambda: not server.open)


def test_an_answer_that_is_not_taken_cannot_keep_a_closing_connection(loop):
    with wire_server(hurried(stall_seconds=0.3), loop) as server, socket.socket() as wire:
        # Too much for the machine's buffers, too little for the server to wait before it closes.
        server.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.connect(server.name)
        wire.sendall(post("/", b"x" * 50000, "Connection: close"))
        wait_until(lambda: server.server.server_state.total_requests == 1)
        wait_until(lambda: not server.open)


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


def test_a_client_within_its_handshake_makes_room_for_another(loop, authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with wire_server(hurried(connections=1), loop, tls=context) as server, server.connect() as silent:
        wait_until(lambda: server.call(server.server.servers[0]._connections.cut_longest_waiting))
        assert rest_of(silent) == b""
        with trusting.wrap_socket(server.connect(), server_hostname="localhost") as wire:
            wire.sendall(get("/", "1.1", "Connection: close"))
            assert b" 200 " in rest_of(wire)


def test_a_handshake_that_drips_is_late_in_all(loop, authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    with wire_server(hurried(handshake_seconds=0.3), loop, tls=context) as server:
        with server.connect() as silent, server.connect() as dripping:
            # A record that promises more than it brings.
            dripping.sendall(b"\x16\x03\x01\x10\x00")
            drip_until_closed(dripping, b"\x01")
            assert rest_of(silent) == b""
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)

        def is_served() -> bool:
            try:
                with trusting.wrap_socket(server.connect(), server_hostname="localhost") as wire:
                    wire.sendall(get("/", "1.1", "Connection: close"))
                    return json_of(rest_of(wire))["scheme"] == "https"
            except OSError:
                return False

        # On a busy machine this handshake may be late too.
        wait_until(is_served)


# bounds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["new", "head", "idle", "discarding"])
def test_the_longest_waiting_connection_gives_way_to_a_new_one(loop, state):
    sent = {
        "new": b"",
        "head": b"GET / HTTP/1.1\r\n",
        "idle": get(),
        "discarding": post("/early", b"x" * 100)[:-50],
    }[state]
    with wire_server(hurried(connections=3), loop) as server:
        waiting = [server.connect() for _ in range(3)]
        for wire in waiting:
            wire.sendall(sent)
        reached = {"new": State.HEAD, "head": State.HEAD, "idle": State.IDLE, "discarding": State.DISCARDING}[state]
        # One that has just come is not cut before what it sent is read.
        wait_until(lambda: [each.state for each in server.open if not each._fresh] == [reached] * 3)
        assert b" 200 " in server.ask(get("/", "1.1", "Connection: close"))
        wait_until(lambda: any(map(rest_within, waiting)))
        assert sum(map(rest_within, waiting)) == 1
        for wire in waiting:
            wire.close()


def test_a_request_that_is_already_here_is_not_cut_in_favour_of_a_newer_client(loop):
    with wire_server(hurried(connections=1), loop) as server:
        held, go = threading.Event(), threading.Event()
        server.loop.call_soon_threadsafe(lambda: (held.set(), go.wait()))
        held.wait()
        # Both are in the machine's buffers before the server accepts the first of them.
        with server.connect() as first, server.connect() as second:
            first.sendall(get("/", "1.1", "Connection: close"))
            second.sendall(get("/", "1.1", "Connection: close"))
            go.set()
            assert rest_of(first).startswith(b"HTTP/1.1 200 ")
            assert rest_of(second).startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 503 "))


def rest_within(wire: socket.socket) -> bool:
    """Return whether the server has closed this connection, without waiting for it."""
    wire.setblocking(False)
    try:
        while wire.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_when_every_connection_has_a_request_under_way_more_are_refused_at_once(loop):
    with wire_server(hurried(connections=3), loop) as server:
        holding = [server.connect() for _ in range(3)]
        for wire in holding:
            wire.sendall(get("/hold", "1.1", "Connection: close"))
        wait_until(lambda: server.app.held == 3)
        for sent in (b"", get(), post("/", b"x" * 100_000)):
            refused = server.ask(sent)
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1\r\n" in refused
            assert b"\r\nconnection: close\r\n" in refused
            assert json_of(refused)["error"]["type"] == "service_unavailable"
        server.call(server.app.go.set)
        for wire in holding:
            assert b" 200 " in rest_of(wire)
        wait_until(lambda: not server.open)
        assert b" 200 " in server.ask(get("/", "1.1", "Connection: close"))


def test_refused_clients_that_stay_do_not_pile_up(loop):
    with wire_server(hurried(connections=1), loop) as server, server.connect() as holding:
        holding.sendall(get("/hold"))
        wait_until(lambda: server.app.held == 1)
        staying = [server.connect() for _ in range(30)]
        for wire in staying:
            receive_until(wire, b"}}")
        # One that was cut leaves in a later iteration of the loop. No deadline ends the others.
        wait_until(lambda: len(server.open) <= 1 + 8)
        for wire in staying:
            wire.close()


def test_refused_clients_that_are_cut_while_they_are_accepted_do_not_stay(loop):
    # In every turn of the loop five more clients come, so that some are cut between two turns of being accepted.
    staying = []

    def come(server: WireServer, turns: int, done: threading.Event) -> None:
        staying.extend(server.connect() for _ in range(5))
        server.server.servers[0]._accept()
        server.loop.call_soon(*((come, server, turns - 1, done) if turns else (done.set,)))

    with wire_server(hurried(connections=1), loop) as server, server.connect() as holding:
        holding.sendall(get("/hold"))
        wait_until(lambda: server.app.held == 1)
        done = threading.Event()
        server.loop.call_soon_threadsafe(come, server, 6, done)
        assert done.wait(SECONDS)
        for wire in staying:
            receive_until(wire, b"}}")
        wait_until(lambda: len(server.open) <= 1 + 8)
        for wire in staying:
            wire.close()


def test_one_address_cannot_take_every_connection(loop, monkeypatch):
    # Loopback has no bound of its own; here it is an address like others.
    monkeypatch.setattr("weft.server.http.protocol.share_of", lambda address: address)
    with wire_server(hurried(connections=10, connections_per_address=2), loop) as server:
        holding = [server.connect() for _ in range(2)]
        for wire in holding:
            wire.sendall(get("/hold", "1.1", "Connection: close"))
        wait_until(lambda: server.app.held == 2)
        assert server.ask(get()).startswith(b"HTTP/1.1 429 ")
        server.call(server.app.go.set)
        for wire in holding:
            assert b" 200 " in rest_of(wire)


def test_clients_of_this_machine_have_no_bound_per_address(loop):
    with wire_server(hurried(connections=10, connections_per_address=1), loop) as server, server.connect() as first:
        first.sendall(get("/hold"))
        wait_until(lambda: server.app.held == 1)
        assert b" 200 " in server.ask(get("/", "1.1", "Connection: close"))


def test_behind_a_trusted_proxy_every_client_has_its_own_bound(loop):
    limits = hurried(connections=10, connections_per_address=1)
    with wire_server(limits, loop, trusted_proxies=("127.0.0.1",)) as server, server.connect() as proxy:
        proxy.sendall(get("/hold", "1.1", "X-Forwarded-For: 9.9.9.9"))
        wait_until(lambda: server.app.held == 1)

        def asked_for(client: str) -> bytes:
            return server.ask(get("/", "1.1", f"X-Forwarded-For: {client}", "Connection: close"))

        # What the client wrote itself, on the left, counts for nothing.
        for client in ("9.9.9.9", "8.8.8.8, 9.9.9.9", "9.9.9.9, 127.0.0.1"):
            assert asked_for(client).startswith(b"HTTP/1.1 429 ")
        assert json_of(asked_for("9.9.9.9, 8.8.8.8"))["client"] == ["8.8.8.8", 0]
        server.call(server.app.go.set)
        receive_until(proxy, b"}}")
        assert asked_for("9.9.9.9").startswith(b"HTTP/1.1 200 ")


def test_a_client_cannot_choose_its_own_address(loop):
    forged = get("/", "1.1", "X-Forwarded-For: 9.9.9.9", "X-Forwarded-Proto: https", "Connection: close")
    with wire_server(PATIENT, loop) as server:
        seen = json_of(server.ask(forged))
    assert seen["client"][0] == "127.0.0.1"
    assert seen["scheme"] == "http"
