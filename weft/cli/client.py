"""A small HTTP client for OpenAI-compatible servers: JSON in, JSON or an event stream out, with keep-alive.

Made for measuring: nothing stands between a chunk on the wire and the clock. No redirects, no proxies, no compression.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from weft import __version__
from weft.base.errors import OptionError, WeftError

# Stream lines can be long: top log-probabilities, whole tool calls.
LINE_BYTES = 1 << 24
SHOWN = 300


class ServerError(WeftError):
    """The server cannot be reached, or it answered with an error."""


@dataclass(slots=True)
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass(slots=True)
class Response:
    """Head of a response, and how its body ends: by chunks, by length, or with the connection."""

    status: int
    headers: dict[str, str]
    connection: Connection

    @property
    def keeps_alive(self) -> bool:
        ends = "content-length" in self.headers or self.chunked
        return ends and self.headers.get("connection", "").lower() != "close"

    @property
    def chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Everything that has arrived is one piece, however many chunks it is."""
        reader = self.connection.reader
        if self.chunked:
            chunks = Chunks()
            while not chunks.ended:
                data = await reader.read(1 << 16)
                if not data:
                    raise EOFError("the response ends within a chunk")
                piece = chunks.feed(data)
                if piece:
                    yield piece
        elif "content-length" in self.headers:
            yield await reader.readexactly(int(self.headers["content-length"]))
        else:
            while piece := await reader.read(1 << 16):
                yield piece

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])


class Chunks:
    """Decodes a chunked body from the bytes of a connection. Reading stops with the body: servers wait for requests."""

    def __init__(self) -> None:
        self.ended = False
        self._rest = b""  # the start of a line
        self._left = 0  # bytes of the current chunk
        self._after = False  # whether the line end after a chunk comes next
        self._trailing = False

    def feed(self, data: bytes) -> bytes:
        """Return the content in these bytes."""
        data, place, found = self._rest + data, 0, []
        self._rest = b""
        while place < len(data) and not self.ended:
            if self._left:
                part = data[place : place + self._left]
                found.append(part)
                place += len(part)
                self._left -= len(part)
                self._after = not self._left
                continue
            end = data.find(b"\n", place)
            if end < 0:
                self._rest = data[place:]
                if len(self._rest) > LINE_BYTES:
                    raise ValueError("a line of the response is too long")
                break
            self._line(data[place:end].rstrip(b"\r"))
            place = end + 1
        return b"".join(found)

    def _line(self, line: bytes) -> None:
        if self._trailing:
            self.ended = not line
        elif self._after:
            self._after = False
        else:
            self._left = int(line.partition(b";")[0], 16)
            self._trailing = not self._left


class Client:
    """Connection to one server, for one event loop. `url` is its root, with or without /v1; `unix:PATH` is a socket."""

    def __init__(self, url: str, api_key: str | None = None, timeout_seconds: float | None = 3600.0) -> None:
        self._unix = url.removeprefix("unix:") if url.startswith("unix:") else None
        parts = urlsplit("http://localhost" if self._unix else url if "://" in url else f"http://{url}")
        if self._unix == "" or parts.scheme not in ("http", "https") or not parts.hostname:
            raise OptionError(f"url must look like http://127.0.0.1:8000 or unix:/run/weft.sock, got {url!r}")
        self.url = url if self._unix else f"{parts.scheme}://{parts.netloc}"
        self._secure = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._secure else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._idle: list[Connection] = []
        self._timeout = timeout_seconds
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        agent = f"User-Agent: weft/{__version__}\r\n"
        self._headers = f"Host: {parts.netloc}\r\n{agent}{key}Accept-Encoding: identity\r\n"

    async def get(self, path: str) -> Any:
        return await self._json("GET", path, None)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        return await self._json("POST", path, body)

    async def stream(self, path: str, body: dict[str, Any] | None) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a streamed response up to [DONE]; raise on an error event. Without a body, GET it."""
        async with self._exchange("GET" if body is None else "POST", path, body) as response:
            if response.status != 200:
                raise _failure(response.status, await response.body())
            async for data in events(response):
                if data == b"[DONE]":
                    continue  # read on to the end of the body, to keep the connection usable
                event = msgspec.json.decode(data)
                if "error" in event:
                    raise ServerError(_message(event))
                yield event

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().writer.close()

    async def _json(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        async with self._exchange(method, path, body) as response:
            text = await response.body()
            if response.status != 200:
                raise _failure(response.status, text)
            try:
                return json.loads(text) if text else None
            except ValueError:
                raise ServerError(f"{self.url}{path} did not return JSON: {text[:SHOWN]!r}") from None

    @asynccontextmanager
    async def _exchange(self, method: str, path: str, body: dict[str, Any] | None) -> AsyncIterator[Response]:
        content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        kind = "" if body is None else "Content-Type: application/json\r\n"
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{kind}Content-Length: {len(content)}\r\n\r\n"
        connection = None
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._send(head.encode() + content)
                connection = response.connection
                yield response
                if response.keeps_alive:
                    self._idle.append(connection)
                    connection = None
        except TimeoutError:
            raise ServerError(f"{self.url} did not answer within {self._timeout or 0:g} s") from None
        except (OSError, EOFError, asyncio.IncompleteReadError, ValueError, msgspec.DecodeError) as error:
            raise ServerError(f"{self.url} closed the connection: {error!r}") from None
        finally:
            if connection is not None:
                connection.writer.close()

    async def _send(self, message: bytes) -> Response:
        """Send a message; retry on a fresh connection if the server has closed the idle one."""
        while True:
            kept = bool(self._idle)
            connection = self._idle.pop() if kept else await self._open()
            try:
                connection.writer.write(message)
                await connection.writer.drain()
                return await _head(connection)
            except (OSError, EOFError, asyncio.IncompleteReadError):
                connection.writer.close()
                if not kept:
                    raise
            except BaseException:
                connection.writer.close()
                raise

    async def _open(self) -> Connection:
        try:
            if self._unix is not None:
                opened = await asyncio.open_unix_connection(self._unix, limit=LINE_BYTES)
            else:
                opened = await asyncio.open_connection(self._host, self._port, ssl=self._secure, limit=LINE_BYTES)
        except OSError as error:
            raise ServerError(f"cannot connect to {self.url}: {error}") from None
        return Connection(*opened)


async def _line(reader: asyncio.StreamReader) -> bytes:
    return (await reader.readuntil(b"\n")).rstrip(b"\r\n")


async def _head(connection: Connection) -> Response:
    version, _, status = (await _line(connection.reader)).partition(b" ")
    if not version.startswith(b"HTTP/"):
        raise ValueError(f"not an HTTP response: {version[:SHOWN]!r}")
    headers: dict[str, str] = {}
    while line := await _line(connection.reader):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return Response(int(status[:3]), headers, connection)


async def events(response: Response) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events, one line each, however the chunks are split."""
    rest = b""
    async for piece in response.pieces():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _failure(status: int, text: bytes) -> ServerError:
    try:
        return ServerError(f"status {status}: {_message(json.loads(text))}")
    except ValueError:
        return ServerError(f"status {status}: {text[:SHOWN].decode(errors='replace')}")


def _message(event: Any) -> str:
    error = event.get("error", event) if isinstance(event, dict) else event
    return str(error.get("message", error) if isinstance(error, dict) else error)[:SHOWN]
