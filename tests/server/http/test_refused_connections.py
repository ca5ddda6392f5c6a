"""Answers that a connection gives by itself have an id, a count and one line in the log, like all others."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.support.servers.access_lines import FIELDS, lines, shown
from tests.support.servers.held_steps import wait_until
from tests.support.servers.patience import PATIENT
from tests.support.servers.wire_server import LOOPS, WireServer, get, post, receive_until, rest_of, wire_server
from weft.base.logs import TextLines
from weft.server.http.protocol import MAX_PIPELINED

KEY = "Authorization: Bearer sesame"
CHUNKED = f"POST /hold HTTP/1.1\r\nHost: localhost\r\n{KEY}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


@pytest.fixture(autouse=True)
def _informed(caplog):
    caplog.set_level(logging.INFO, "weft")


@pytest.fixture(params=LOOPS)
def loop(request):
    return request.param


def ids(answers: bytes) -> list[str]:
    return re.findall(r"\r\nx-request-id: (\S+)\r\n", answers.decode())


def counted(server: WireServer) -> dict[tuple[str, str, str], int]:
    return dict(server.call(lambda: server.metrics.http))


@contextmanager
def held(loop: str, count: int = 1, **limits: Any) -> Iterator[WireServer]:
    """Provide a server with this many requests under way."""
    with wire_server(replace(PATIENT, **limits), loop) as server:
        holding = [server.connect() for _ in range(count)]
        for wire in holding:
            wire.sendall(get("/hold", "1.1", "Connection: close"))
        wait_until(lambda: server.app.held == count)
        yield server
        server.call(server.app.go.set)
        for wire in holding:
            rest_of(wire)


REFUSED = {
    "no HTTP": (b"sesame\r\n\r\n", 400),
    "two hosts": (get("/sesame", "1.1", "Host: other", KEY), 400),
    "an endless head": (get("/sesame", "1.1", KEY, "x: " + "x" * 5000)[:-4], 431),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_request_is_logged_and_counted_without_what_it_said(loop, case, caplog):
    sent, status = REFUSED[case]
    with wire_server(PATIENT, loop) as server:
        [name] = ids(server.ask(sent))
        assert counted(server) == {("other", "other", str(status)): 1}
    [line] = lines(caplog)
    assert list(line) == FIELDS
    known = {"id": name, "key": None, "client": "127.0.0.1", "method": "other", "route": "other", "status": status}
    assert line.items() >= (known | {"tokens_in": None, "end": "error"}).items()
    assert len(name) == 32
    assert "sesame" not in shown(caplog, TextLines())


def test_a_late_head_is_logged_with_the_time_that_it_took(loop, caplog):
    with wire_server(replace(PATIENT, header_seconds=0.05), loop) as server, server.connect() as wire:
        # Nothing is sent: once a head begins, its time counts from there, but the deadline from the connection on.
        [name] = ids(rest_of(wire))
    [line] = lines(caplog)
    assert (line["id"], line["status"]) == (name, 408)
    # Timers of a loop may fire a tick early.
    assert line["total_ms"] >= 40


def test_a_refusal_for_want_of_room_is_logged_with_its_client(loop, caplog):
    with held(loop, connections=1) as server:
        found = [ids(server.ask(sent)) for sent in (b"", get("/sesame", "1.1", KEY))]
        refused = lines(caplog)
    assert [[line["id"]] for line in refused] == found
    assert [(line["status"], line["client"], line["end"]) for line in refused] == [(503, "127.0.0.1", "error")] * 2
    assert "sesame" not in shown(caplog, TextLines())


def test_a_refusal_behind_a_proxy_names_the_client_and_keeps_its_id(loop, caplog):
    limits = replace(PATIENT, connections_per_address=1)
    headers = "X-Forwarded-For: 9.9.9.9", "X-Request-Id: job-7", "Connection: close"
    with wire_server(limits, loop, trusted_proxies=("127.0.0.1",)) as server, server.connect() as proxy:
        proxy.sendall(get("/hold", "1.1", headers[0]))
        wait_until(lambda: server.app.held == 1)
        assert ids(server.ask(get("/", "1.1", *headers))) == ["job-7"]
        wait_until(lambda: lines(caplog))
        assert [(line["id"], line["status"], line["client"]) for line in lines(caplog)] == [("job-7", 429, "9.9.9.9")]
        assert counted(server) == {("GET", "other", "429"): 1}
        server.call(server.app.go.set)
        receive_until(proxy, b"}}")


def test_a_request_too_many_ahead_keeps_the_id_of_its_client(loop, caplog):
    with wire_server(PATIENT, loop) as server, server.connect() as wire:
        sent = [get("/hold", "1.1", f"X-Request-Id: job-{number}") for number in range(MAX_PIPELINED + 2)]
        wire.sendall(b"".join(sent))
        server.call(server.app.go.set)
        found = ids(rest_of(wire))
    assert found == [f"job-{number}" for number in range(MAX_PIPELINED + 2)]
    logged = {line["id"]: line["status"] for line in lines(caplog)}
    assert len(lines(caplog)) == len(found)
    assert [logged[name] for name in found] == [200] * (MAX_PIPELINED + 1) + [400]


def test_a_request_whose_body_is_broken_has_one_line_with_what_its_client_got(loop, caplog):
    with wire_server(PATIENT, loop) as server:
        [name] = ids(server.ask(CHUNKED + b"no size\r\n"))
        wait_until(lambda: lines(caplog))
        assert counted(server) == {("POST", "other", "400"): 1}
    assert [(line["id"], line["status"], line["end"]) for line in lines(caplog)] == [(name, 400, "error")]


def test_a_broken_body_that_waits_for_its_turn_is_logged_once(loop, caplog):
    with wire_server(PATIENT, loop) as server, server.connect() as wire:
        wire.sendall(post("/hold", b"x", "X-Request-Id: first"))
        wait_until(lambda: server.app.held == 1)
        wire.sendall(CHUNKED.replace(b"Host", b"X-Request-Id: second\r\nHost") + b"no size\r\n")
        server.call(server.app.go.set)
        assert ids(rest_of(wire)) == ["first", "second"]
        assert server.app.held == 1
    assert sorted((line["id"], line["status"]) for line in lines(caplog)) == [("first", 200), ("second", 400)]


def test_refusals_are_not_logged_if_so_told_but_have_an_id(caplog):
    with wire_server(PATIENT, log_requests=False) as server:
        [name] = ids(server.ask(b"nonsense\r\n\r\n"))
    assert len(name) == 32
    assert lines(caplog) == []
