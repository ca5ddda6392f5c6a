"""HTTP/1.1 as bytes on a connection: framing, order, old versions, upgrades, and what must not pass as a request."""

from __future__ import annotations

import re
import socket

import pytest

from tests.support.servers.held_steps import wait_until
from tests.support.servers.wire_server import LOOPS, WireServer, get, json_of, post, receive_until, rest_of, wire_server
from weft.server.http.protocol import MAX_PIPELINED
from weft.server.settings import Limits

CLOSE = "Connection: close"
LAST = get("/last", "1.1", CLOSE)


@pytest.fixture(scope="module", params=LOOPS)
def server(request):
    with wire_server(Limits(header_bytes=4096, body_bytes=1 << 20), request.param) as found:
        yield found


def statuses(answers: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]


# framing --------------------------------------------------------------------------------------------------------------


def test_a_body_arrives_however_it_is_cut(server: WireServer):
    assert json_of(server.ask(post("/a", b"hello", CLOSE)))["body"] == "hello"
    with server.connect() as wire:
        for number in range(len(post("/a", b"hello", CLOSE))):
            wire.sendall(post("/a", b"hello", CLOSE)[number : number + 1])
        assert json_of(rest_of(wire))["body"] == "hello"


def test_a_chunked_body_arrives_and_its_trailers_are_no_headers(server: WireServer):
    head = f"POST /a?b=c%20d HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n{CLOSE}\r\n\r\n".encode()
    seen = json_of(server.ask(head, b"3;x=y\r\nabc\r\n", b"2\r\nde\r", b"\n0\r\nAuthorization: late\r\n\r\n"))
    assert seen["body"] == "abcde"
    assert seen["query"] == "b=c%20d"
    assert "authorization" not in seen["headers"]


def test_a_large_body_arrives_though_the_application_is_slower_than_the_wire(server: WireServer):
    assert len(json_of(server.ask(post("/a", b"x" * 900_000, CLOSE)))["body"]) == 900_000


@pytest.mark.parametrize("garbage", [b"0\r\na: " + b"x" * 200_000, b"1;" + b"x" * 200_000])
def test_what_lies_between_chunks_is_bounded(server: WireServer, garbage):
    head = b"POST /a HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    # In parts, for what arrives in one read is in memory anyway.
    assert statuses(server.ask(head, *[garbage[at : at + 1000] for at in range(0, len(garbage), 1000)])) == [431]


def test_a_head_request_gets_the_head_alone(server: WireServer):
    head, _, body = server.ask(get("/a", "1.1", CLOSE).replace(b"GET", b"HEAD")).partition(b"\r\n\r\n")
    assert b"content-length: " in head
    assert body == b""


def test_a_connection_serves_many_requests(server: WireServer):
    with server.connect() as wire:
        for number in range(3):
            wire.sendall(get(f"/{number}"))
            assert json_of(receive_until(wire, b"}}"))["path"] == f"/{number}"


def test_after_an_early_answer_the_next_request_is_found_behind_the_unread_body(server: WireServer):
    sent = post("/early", b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answers = server.ask(sent, LAST)
    assert statuses(answers) == [401, 200]
    assert json_of(answers)["path"] == "/last"


def test_an_early_answer_reaches_a_client_that_first_sends_all_of_its_body(server: WireServer):
    for more in ((), (CLOSE,)):
        with server.connect() as wire:
            wire.sendall(post("/early", b"x" * 8_000_000, *more))
            assert statuses(receive_until(wire, b"early")) == [401]


# versions -------------------------------------------------------------------------------------------------------------


def test_a_stream_to_an_old_client_has_no_chunks_and_ends_with_the_connection(server: WireServer):
    head, _, body = server.ask(b"GET /stream HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert body == b"one two three"
    head, _, body = server.ask(get("/stream", "1.1", CLOSE)).partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert body == b"4\r\none \r\n4\r\ntwo \r\n5\r\nthree\r\n0\r\n\r\n"


def test_an_old_client_need_not_name_a_host_and_is_served_once(server: WireServer):
    answer = server.ask(b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert statuses(answer) == [200]
    assert b"connection: close" in answer


@pytest.mark.parametrize(
    "upgrade",
    [
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA",
        "Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x",
    ],
)
def test_a_wish_for_another_protocol_is_ignored_and_the_body_arrives(server: WireServer, upgrade):
    for sent in ([post("/a", b"hello", upgrade) + LAST], [post("/a", b"hello", upgrade)[:-3], b"llo", LAST]):
        with server.connect() as wire:
            for part in sent:
                wire.sendall(part)
            assert json_of(receive_until(wire, b"}}"))["body"] == "hello"
            assert json_of(rest_of(wire))["path"] == "/last"


# order ----------------------------------------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_their_order(server: WireServer):
    sent = b"".join(post(f"/{number}", b"x" * number) for number in range(MAX_PIPELINED)) + LAST
    answers = server.ask(sent)
    assert [f"/{number}".encode() in answers for number in range(MAX_PIPELINED)] == [True] * MAX_PIPELINED
    places = [answers.index(b'"path":"/%d"' % number) for number in range(MAX_PIPELINED)]
    assert places == sorted(places)
    assert json_of(answers)["path"] == "/last"


def test_more_requests_ahead_than_allowed_are_refused_after_the_answers_to_the_others(server: WireServer):
    server.call(server.app.go.clear)
    with server.connect() as wire:
        wire.sendall(get("/hold") + get() * (MAX_PIPELINED + 5))
        server.call(server.app.go.set)
        answers = rest_of(wire)
    assert statuses(answers) == [200] * (MAX_PIPELINED + 1) + [400]


@pytest.mark.parametrize(
    ("second", "status"), [(b"nonsense\r\n\r\n", 400), (b"GET / HTTP/1.1\r\nx: " + b"x" * 5000, 431)]
)
def test_a_refusal_waits_for_the_answer_before_it(server: WireServer, second, status):
    server.call(server.app.go.clear)
    before = server.app.held
    with server.connect() as wire:
        wire.sendall(get("/hold/1"))
        wait_until(lambda: server.app.held == before + 1)
        wire.sendall(second)
        wire.sendall(b"x")
        server.call(server.app.go.set)
        answers = rest_of(wire)
    assert statuses(answers) == [200, status]
    assert b'"/hold/1"' in answers


def test_a_client_that_leaves_ends_its_request_and_those_behind_it(server: WireServer):
    server.app.ended.clear()
    with server.connect() as wire:
        wire.sendall(get("/endless"))
        receive_until(wire, b"three")
        wire.sendall(get("/never"))
    wait_until(lambda: "/endless" in server.app.ended)
    assert "/never" not in server.app.ended


# Expect ---------------------------------------------------------------------------------------------------------------


def test_a_client_that_waits_for_it_is_asked_for_its_body(server: WireServer):
    sent = post("/a", b"hello", "Expect: 100-continue", CLOSE)
    with server.connect() as wire:
        wire.sendall(sent[:-5])
        assert receive_until(wire, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        wire.sendall(sent[-5:])
        assert json_of(rest_of(wire))["body"] == "hello"


def test_a_client_that_was_never_asked_for_its_body_must_begin_anew(server: WireServer):
    """It may send the body or leave it out, so nothing that follows on the connection can be trusted."""
    sent = post("/early", LAST, "Expect: 100-continue")
    answer = server.ask(sent.removesuffix(LAST) + LAST)
    assert statuses(answer) == [401]
    assert b"connection: close" in answer


# requests that two servers could read differently ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        "POST / HTTP/1.1|Host: a|Content-Length: 3|Content-Length: 3",
        "POST / HTTP/1.1|Host: a|Content-Length: 3|Content-Length: 4",
        "POST / HTTP/1.1|Host: a|Content-Length: 3, 3",
        "POST / HTTP/1.1|Host: a|Content-Length: +3",
        "POST / HTTP/1.1|Host: a|Content-Length: 3|Transfer-Encoding: chunked",
        "POST / HTTP/1.1|Host: a|Transfer-Encoding: chunked|Content-Length: 3",
        "POST / HTTP/1.1|Host: a|Transfer-Encoding: chunked, identity",
        "POST / HTTP/1.1|Host: a|Transfer-Encoding: xchunked",
        "POST / HTTP/1.1|Host: a|Transfer-Encoding : chunked",
        "POST / HTTP/1.1|Host: a|Host: b",
        "GET / HTTP/1.1",
        "GET / HTTP/1.1|Host: a|x: y\x00z",
        "GET / HTTP/1.1|Host: a|x: y| folded: z",
        "GET / HTTP/1.1|Host: a|x y: z",
        "GET / HTTP/2.0|Host: a",
        "GET /|Host: a",
        "GET /a b HTTP/1.1|Host: a",
        "CONNECT a:80 HTTP/1.1|Host: a",
        "PRI * HTTP/2.0",
        "GET / HTTP/1.1|Host: a b",
        "GET / HTTP/1.1|Host: a@b",
        "GET / HTTP/1.1|Host: a/b",
        "GET / HTTP/1.1|Host: a, b",
        "GET / HTTP/1.1|Host: a%2eb",
        "GET / HTTP/1.1|Host: a:b",
        "GET / HTTP/1.1|Host: a:80:80",
        "GET / HTTP/1.1|Host: a:99999",
        "GET / HTTP/1.1|Host: ::1",
        "GET / HTTP/1.1|Host: [::1",
        "GET / HTTP/1.1|Host: [::1]x",
        "GET / HTTP/1.1|Host: [fe80::1%eth0]",
        "GET / HTTP/1.1|Host: [localhost]",
        "GET / HTTP/1.1|Host: \u00e4",
        "GET / HTTP/1.0|Host: a b",
        "GET http://b/ HTTP/1.1|Host: a",
        "GET http://a@b/ HTTP/1.1|Host: b",
        "GET http://b/ HTTP/1.0",
    ],
)
def test_ambiguous_requests_are_refused_and_nothing_behind_them_is_read(server: WireServer, head):
    sent = head.replace("|", "\r\n").encode() + b"\r\n\r\n"
    server.app.ended.clear()
    assert statuses(server.ask(sent + b"0\r\n\r\n" + LAST)) == [400]
    assert "/last" not in server.app.ended


@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("/", ""),
        ("/", "localhost"),
        ("/", "Localhost.:8000"),
        ("/", "under_score.example-1.com:"),
        ("/", "127.0.0.1:80"),
        ("/", "[::1]"),
        ("/", "[2001:DB8::1]:65535"),
        ("http://a.b:80/", "A.b"),
        ("http://[::1]:8000/", "[0:0::1]:8000"),
    ],
)
def test_hosts_of_the_grammar_are_answered(server: WireServer, target, host):
    assert statuses(server.ask(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n{CLOSE}\r\n\r\n".encode())) == [200]


def test_bare_line_feeds_end_no_line(server: WireServer):
    assert statuses(server.ask(b"GET / HTTP/1.1\nHost: a\n\n" + LAST)) == [400]
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert statuses(server.ask(head + b"3\nabc\n0\n\n" + LAST)) == [400]


# applications that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/broken", "/unanswered"])
def test_a_request_that_the_application_does_not_answer_gets_a_500(server: WireServer, path, caplog):
    answer = server.ask(get(path))
    assert statuses(answer) == [500]
    assert json_of(answer)["error"]["type"] == "server_error"
    assert "application" in caplog.text


def test_a_client_that_resets_its_connection_harms_nobody(server: WireServer):
    for sent in (b"", get("/endless"), post("/a", b"x" * 100)[:-50]):
        wire = server.connect()
        wire.sendall(sent)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        wire.close()
    assert statuses(server.ask(LAST)) == [200]
    wait_until(lambda: not server.open)
