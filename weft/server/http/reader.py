"""Parses one connection's bytes into events. Knows no socket, no time and no route.

httptools (llhttp) does the parsing. It accepts headers and trailers of any size, and stops at a request to upgrade the
protocol. `tests/server/http/test_http_wire.py` covers what it refuses itself: two lengths, unknown encodings, bare line
feeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import httptools

from weft.server.http.hosts import host_of

Header = tuple[bytes, bytes]

VERSIONS = ("1.0", "1.1")
MALFORMED = "the request is not valid HTTP/1.1"
# Headers that request another protocol on this connection.
UPGRADES = (b"upgrade", b"http2-settings")
# Per connection. A client asks once and stops when it is not answered; each request costs a second parse of its head
# and a copy of what was received after it.
MAX_UPGRADES = 4


class Mark(Enum):
    """A position in the stream of requests."""

    HEAD_BEGUN = auto()
    REQUEST_ENDED = auto()


@dataclass(frozen=True, slots=True)
class Head:
    """A request without its body. Header names are in lower case."""

    method: str
    path: bytes
    query: bytes
    version: str
    headers: list[Header]
    keep_alive: bool

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for permission to send the body."""
        expects = any(name == b"expect" and value.lower() == b"100-continue" for name, value in self.headers)
        return expects and self.version == "1.1"


# Bytes are a part of the body.
Event = Mark | Head | bytes


class HttpReader:
    """Turns input into events. After a `fault`, a status and a message, nothing more can be read."""

    def __init__(self, header_bytes: int) -> None:
        self.fault: tuple[int, str] | None = None
        self._header_bytes = header_bytes
        self._parser: Any = httptools.HttpRequestParser(self)
        # Bytes received since the parser last completed a part of a header or body.
        self._loose_bytes = 0
        self._in_body = False
        self._upgrades = 0
        self._url = b""
        self._headers: list[Header] = []
        self._events: list[Event] = []

    def feed(self, data: bytes) -> list[Event]:
        """Return the events of more input; those before a fault are complete."""
        self._feed(data)
        if self.fault is None and self._loose_bytes > self._header_bytes:
            self.fault = 431, f"the request headers or trailers exceed {self._header_bytes} bytes"
        # The reader and its parser refer to each other, and must not keep a body until they are collected.
        events, self._events = self._events, []
        return events

    def _feed(self, data: bytes) -> None:
        while self._upgrades <= MAX_UPGRADES:
            self._loose_bytes += len(data)
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._upgrades += 1
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self._parser, self._loose_bytes = httptools.HttpRequestParser(self), 0
            except httptools.HttpParserError:
                self.fault = 400, MALFORMED
                return
            else:
                return
        self.fault = 400, MALFORMED

    def _head_without_upgrade(self) -> bytes:
        """Return the headers without the upgrade, to be parsed again, because the parser skipped the body."""
        version = self._parser.get_http_version().encode()
        lines = [self._parser.get_method() + b" " + self._url + b" HTTP/" + version]
        for name, value in self._headers:
            if name == b"connection":
                tokens = (token.strip() for token in value.split(b","))
                value = b", ".join(token for token in tokens if token.lower() not in UPGRADES)
            if name not in UPGRADES:
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    # called by the parser; exceptions are faults ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._events.append(Mark.HEAD_BEGUN)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers, which follow the body, are ignored.
        if not self._in_body:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        method = self._parser.get_method()
        if self._parser.should_upgrade() and method != b"CONNECT":
            return
        version = self._parser.get_http_version()
        hosts = [host_of(value.decode("latin-1")) for name, value in self._headers if name == b"host"]
        # Exactly one host, so that a proxy and this server cannot disagree on it; HTTP/1.0 may omit it.
        if version not in VERSIONS or len(hosts) > 1 or None in hosts or (not hosts and version == "1.1"):
            raise ValueError(MALFORMED)
        url = httptools.parse_url(self._url)
        if not url.path.isascii() or not agree(url, hosts):
            raise ValueError(MALFORMED)
        keep_alive = version == "1.1" and self._parser.should_keep_alive()
        head = Head(method.decode("ascii"), url.path, url.query or b"", version, self._headers, keep_alive)
        self._events.append(head)
        self._in_body, self._loose_bytes = True, 0

    def on_body(self, body: bytes) -> None:
        self._events.append(body)
        self._loose_bytes = 0

    def on_message_complete(self) -> None:
        if self._in_body:
            self._events.append(Mark.REQUEST_ENDED)
            self._in_body, self._loose_bytes = False, 0


def agree(url: Any, hosts: list[str | None]) -> bool:
    """Return whether a target has no host part, or the same host as the Host header. Forward proxies send one."""
    if url.schema is None:
        return True
    host = url.host.decode("latin-1")
    return url.userinfo is None and hosts == [host_of(f"[{host}]" if ":" in host else host)]
