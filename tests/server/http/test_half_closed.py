"""Clients that close their sending side: those that wait get their answer, and those that left end their request."""

from __future__ import annotations

import json
import re
import socket
import ssl

import pytest
import trustme

from tests.support.servers.held_steps import wait_until
from tests.support.servers.http_server import serving
from tests.support.servers.wire_server import LOOPS, get, json_of, post, receive_until, rest_of, wire_server
from weft.server.http import half_closed
from weft.server.settings import ServerSettings

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
RESET = b"\x01\x00\x00\x00\x00\x00\x00\x00"


@pytest.fixture(params=LOOPS)
def loop(request):
    return request.param


def statuses(answers: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]


def half_close(wire: socket.socket) -> None:
    wire.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("place", ["port", "unix socket"])
@pytest.mark.parametrize("sent", [get(), post("/", b"x" * 100_000), get("/stream"), get() + get("/last")])
def test_a_client_that_closes_its_side_after_its_request_gets_its_answer(loop, place, sent, tmp_path):
    uds = tmp_path / "socket" if place == "unix socket" else None
    with wire_server(loop=loop, uds=uds) as server, server.connect() as wire:
        wire.sendall(sent)
        half_close(wire)
        answers = [status for status in statuses(rest_of(wire)) if status != 100]
        assert answers == [200] * sent.count(b"HTTP/1.1")
        wait_until(lambda: not server.open)


def test_a_client_that_waits_gets_its_answer_late(loop):
    with wire_server(loop=loop) as server, server.connect() as wire:
        wire.sendall(get("/hold"))
        half_close(wire)
        assert receive_until(wire, b"\r\n\r\n") == CONTINUE
        server.call(server.app.go.set)
        answer = rest_of(wire)
        assert json_of(answer)["path"] == "/hold"
        assert b"\r\nconnection: close\r\n" in answer


@pytest.mark.parametrize("place", ["port", "unix socket"])
def test_a_client_that_left_is_noticed_though_nothing_is_sent_to_it(loop, place, tmp_path):
    uds = tmp_path / "socket" if place == "unix socket" else None
    with wire_server(loop=loop, uds=uds) as server:
        for reset in (False, True):
            wire = server.connect()
            wire.sendall(get(f"/hold/{reset}"))
            wait_until(lambda: len(server.open) == 1)
            if reset:
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            wire.close()
            wait_until(lambda: not server.open)


def test_a_client_that_waits_and_then_leaves_is_noticed(loop, monkeypatch):
    monkeypatch.setattr(half_closed, "PROBE_SECONDS", 0.02)
    with wire_server(loop=loop) as server:
        with server.connect() as wire:
            wire.sendall(get("/hold"))
            half_close(wire)
            # It is still there after some probes.
            for _ in range(3):
                assert receive_until(wire, b"\r\n\r\n") == CONTINUE
        wait_until(lambda: not server.open)


def test_a_request_that_is_not_complete_ends_with_its_clients_side(loop):
    with wire_server(loop=loop) as server, server.connect() as wire:
        wire.sendall(post("/", b"x" * 100)[:-1])
        half_close(wire)
        assert rest_of(wire) == b""


def test_without_interim_answers_the_end_of_input_is_the_end(loop):
    """HTTP/1.0 has none, and TLS has no half of a connection."""
    with wire_server(loop=loop) as server, server.connect() as wire:
        wire.sendall(b"GET /hold HTTP/1.0\r\n\r\n")
        half_close(wire)
        assert rest_of(wire) == b""
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with wire_server(loop=loop, tls=context) as server:
        with trusting.wrap_socket(server.connect(), server_hostname="localhost") as wire:
            wire.sendall(get("/hold"))
            wait_until(lambda: server.app.held == 1)
        wait_until(lambda: not server.open)


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_of_the_model_reaches_a_client_that_closed_its_side(streams):
    body = {"prompt": "x", "max_tokens": 8, "ignore_eos": True, "stream": streams}
    with serving(ServerSettings()) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=300) as wire:
            wire.sendall(post("/v1/completions", json.dumps(body).encode()))
            half_close(wire)
            answer = rest_of(wire)
        assert [status for status in statuses(answer) if status != 100] == [200]
        if streams:
            assert b"data: [DONE]" in answer
            assert answer.endswith(b"0\r\n\r\n")
        else:
            assert json_of(answer)["usage"]["completion_tokens"] == 8
