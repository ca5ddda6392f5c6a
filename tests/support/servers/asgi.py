"""An application without a socket: the test is the client and the engine's clock, and decides who waits for whom."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.servers.fake_engines import InstantEngine, fake_info
from tests.support.servers.held_steps import SECONDS
from weft.engine.events import Output
from weft.server.app import create_app
from weft.server.settings import ServerSettings
from weft.start.thread_backend import ThreadBackend

# No token of the fake engine is one.
END_TOKENS = frozenset([257])


class PacedEngine(InstantEngine):
    """Makes a step for each that was allowed, and any number once it is free."""

    def __init__(self) -> None:
        super().__init__()
        self._allowed = threading.Semaphore(0)
        self._free = threading.Event()

    def allow(self, steps: int) -> None:
        self._allowed.release(steps)

    def free(self) -> None:
        self._free.set()
        self._allowed.release()

    def step(self) -> list[Output]:
        if not self._free.is_set():
            assert self._allowed.acquire(timeout=SECONDS)
        return super().step()


@asynccontextmanager
async def application(
    settings: ServerSettings | None = None, engine: InstantEngine | None = None, **more: Any
) -> AsyncIterator[Any]:
    """The whole application over an engine without a model, which takes token ids."""
    chosen = engine or InstantEngine()
    backend = ThreadBackend(lambda: (chosen, fake_info()))
    await backend.start()
    try:
        yield create_app(backend, None, None, END_TOKENS, settings or ServerSettings(), **more)
    finally:
        if isinstance(chosen, PacedEngine):
            chosen.free()
        await backend.stop(0)


class Exchange:
    """One request. `answer` runs it to its end; `start` leaves it running, for the test to read and to leave."""

    def __init__(
        self, app: Any, path: str, body: Any = None, key: str | None = None, content: bytes | None = None, **scope: Any
    ) -> None:
        headers = [(b"host", b"here")] + ([(b"authorization", f"Bearer {key}".encode())] if key else [])
        self._app = app
        self.scope = {
            "type": "http",
            "method": "GET" if body is None else "POST",
            "path": path,
            "query_string": b"",
            "client": ("192.0.2.7", 1234),
            **scope,
            "headers": headers + scope.get("headers", []),
        }
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        content = content or (b"" if body is None else json.dumps(body).encode())
        self._incoming.put_nowait({"type": "http.request", "body": content})
        self.messages: list[dict[str, Any]] = []
        self._came = asyncio.Event()

    async def answer(self) -> Exchange:
        async with asyncio.timeout(SECONDS):
            await self._app(self.scope, self._incoming.get, self._take)
        return self

    def start(self) -> asyncio.Task[Exchange]:
        return asyncio.ensure_future(self.answer())

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def _take(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._came.set()
        if message["type"] == "http.response.body" and not message.get("more_body"):
            # As ASGI says: what asks for more of the client after the answer learns that there is none.
            self.leave()

    async def until(self, text: bytes) -> None:
        """Until the answer holds this."""
        async with asyncio.timeout(SECONDS):
            while text not in self.body:
                self._came.clear()
                await self._came.wait()

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def json(self) -> Any:
        return json.loads(self.body)
