"""The first of our code that sees a request: hosts, origins, keys, sizes; and the last that sees an error."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.base.errors import RequestError
from weft.server.auth import Keys
from weft.server.errors import response
from weft.server.metrics import Metrics
from weft.server.settings import ServerSettings, host_name
from weft.server.sse import DIRECT


class Guard:
    """Wraps the whole app, so that no route, not even one that does not exist, answers without a key."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._paths = paths
        self._keys = Keys(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            if not begun:
                begun = True
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.answered(scope["method"], path, message["status"])
            await send(message)

        # Streams of thousands of tokens a second go this way, past all that has seen them begin.
        scope[DIRECT] = send
        try:
            self._admit(scope)
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            pass
        except Exception as error:  # the process's edge: every request gets an answer
            if not begun:
                await response(error)(scope, receive, watched)

    def _admit(self, scope: Scope) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if sum(len(name) + len(value) for name, value in headers) > self._settings.limits.header_bytes:
            raise RequestError(f"the headers exceed {self._settings.limits.header_bytes} bytes", 431)
        self._check_browser(headers)
        tenant = self._keys.tenant(headers)
        if tenant is None and not (self._settings.open_health and scope["path"] == "/health"):
            raise HTTPException(401, "no valid key: send Authorization: Bearer KEY")
        scope.setdefault("state", {})["tenant"] = tenant

    def _check_browser(self, headers: list[tuple[bytes, bytes]]) -> None:
        """A page of somebody else, in the browser of somebody who may reach us, is not a client."""
        found = dict(headers)
        host = found.get(b"host", b"").decode("latin-1")
        trusted = self._settings.trusted_hosts
        # No browser leaves the header out; probes of balancers do.
        if trusted and b"host" in found and not is_trusted(host_name(host), trusted):
            raise HTTPException(403, "the Host header names none of this server's hosts; --allowed-host adds one")
        origin = found.get(b"origin")
        if origin is not None and "*" not in self._settings.cors_origins:
            text = origin.decode("latin-1")
            if text not in self._settings.cors_origins and text.partition("://")[2] != host:
                raise HTTPException(403, "requests from web pages of this origin are not allowed")


def is_trusted(name: str, trusted: tuple[str, ...]) -> bool:
    """Return whether a host's name is one of these, or below one that begins with an asterisk.

    >>> [is_trusted(name, ("localhost", "*.a.b")) for name in ("localhost", "c.a.b", "a.b", "ca.b")]
    [True, True, False, False]
    """
    return any(name == each or (each.startswith("*.") and name.endswith(each[1:])) for each in trusted)
