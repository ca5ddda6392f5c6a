"""Admits requests by host, origin, key, size and limits, and answers every error that a route lets through."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.base.errors import RequestError
from weft.server.access.auth import Keys
from weft.server.access_log import Record
from weft.server.http.errors import response
from weft.server.http.hosts import host_of
from weft.server.page import PAGE_ROUTES
from weft.server.settings import ServerSettings

# Routes that answer without a key, unless `open_health` is off. Those of the page do too, unless `page` is off.
# docs/security.md quotes both lists.
OPEN_ROUTES = (
    ("GET", "/health"),
    ("HEAD", "/health"),
    ("GET", "/ping"),
    ("HEAD", "/ping"),
    ("POST", "/ping"),
)


class Guard:
    """Wraps the routes, so that only the open ones answer without a key; even unknown routes require one."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, keys: Keys) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        health, page = OPEN_ROUTES if settings.open_health else (), PAGE_ROUTES if settings.page else ()
        self._open_routes = frozenset(health + page)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        record: Record = scope["state"]["record"]
        try:
            self._admit(scope, record)
            await self._app(scope, receive, send)
        except ClientDisconnect:
            pass
        except Exception as error:  # the outermost handler: every request gets a response
            if record.status is None:
                await response(error, scope["path"])(scope, receive, send)

    def _admit(self, scope: Scope, record: Record) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if sum(len(name) + len(value) for name, value in headers) > self._settings.limits.header_bytes:
            raise RequestError(f"the headers exceed {self._settings.limits.header_bytes} bytes", 431)
        self._check_browser(headers)
        tenant = record.tenant = self._keys.tenant(headers)
        scope["state"]["tenant"] = tenant
        if (scope["method"], scope["path"]) in self._open_routes:
            return
        if tenant is None:
            raise HTTPException(401, "no valid API key; send Authorization: Bearer KEY or X-Api-Key: KEY")
        tenant.account.take_request()

    def _check_browser(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Refuse requests that a foreign web page makes through the browser of a user who can reach the server."""
        found = dict(headers)
        host = found.get(b"host", b"").decode("latin-1")
        trusted, name = self._settings.trusted_hosts, host_of(host)
        if name is None:
            raise HTTPException(400, "the Host header must be a host name or address, with or without a port")
        # Browsers always send the header; health probes of load balancers may not.
        if trusted and b"host" in found and not is_trusted(name, trusted):
            raise HTTPException(403, "the Host header must name an allowed host; add one with --allowed-host")
        origin = found.get(b"origin")
        if origin is not None and "*" not in self._settings.cors_origins:
            text = origin.decode("latin-1")
            if text not in self._settings.cors_origins and text.partition("://")[2] != host:
                raise HTTPException(403, "web pages of this origin are not allowed; add it with --cors-origin")


def is_trusted(name: str, trusted: tuple[str, ...]) -> bool:
    """Return whether a host name is in the list, or below an entry that begins with an asterisk.

    >>> [is_trusted(name, ("localhost", "*.a.b")) for name in ("localhost", "c.a.b", "a.b", "ca.b")]
    [True, True, False, False]
    """
    return any(name == each or (each.startswith("*.") and name.endswith(each[1:])) for each in trusted)
