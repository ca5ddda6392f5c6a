"""A server of batches without a socket, and a client of it."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.servers.asgi import Exchange, application
from tests.support.servers.held_steps import SECONDS
from weft.server.app import Background
from weft.server.batches.store import BatchStore
from weft.server.settings import ServerSettings


def line(name: str, prompt: Any = (5,), **more: Any) -> dict[str, Any]:
    body = {"prompt": list(prompt), "max_tokens": 3, **more}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def form(data: bytes, purpose: str = "batch") -> tuple[bytes, dict[str, str]]:
    request = httpx.Request("POST", "http://x", files={"file": ("in.jsonl", data)}, data={"purpose": purpose})
    return request.read(), dict(request.headers)


class Client:
    """A client of an application without a socket."""

    def __init__(self, app: Any, key: str | None = None) -> None:
        self._app = app
        self._key = key

    async def ask(self, method: str, path: str, body: Any = None, status: int = 200, **scope: Any) -> Any:
        exchange = Exchange(self._app, path, body, self._key, method=method, **scope)
        found = await exchange.answer()
        assert found.status == status, found.body
        return found.json if found.headers["content-type"] == "application/json" else found.body

    async def upload(self, data: bytes, status: int = 200) -> Any:
        content, headers = form(data)
        sent = [(b"host", b"here"), (b"content-type", headers["content-type"].encode())]
        sent += [(b"authorization", f"Bearer {self._key}".encode())] if self._key else []
        exchange = Exchange(self._app, "/v1/files", "", method="POST")
        exchange.scope["headers"] = sent
        exchange._incoming.get_nowait()
        exchange._incoming.put_nowait({"type": "http.request", "body": content})
        found = await exchange.answer()
        assert found.status == status, found.body
        return found.json

    async def batch(self, lines: list[dict[str, Any]], endpoint: str = "/v1/completions") -> Any:
        file = await self.upload(jsonl(lines))
        return await self.ask("POST", "/v1/batches", {"input_file_id": file["id"], "endpoint": endpoint})

    async def ended(self, name: str) -> Any:
        async with asyncio.timeout(SECONDS):
            while True:
                found = await self.ask("GET", f"/v1/batches/{name}")
                if found["status"] not in ("in_progress", "finalizing", "cancelling"):
                    return found
                await asyncio.sleep(0.001)

    async def output(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(each) for each in (await self.ask("GET", f"/v1/files/{name}/content")).splitlines()]


@asynccontextmanager
async def batching(
    folder: Path, settings: ServerSettings | None = None, engine: Any = None, run: bool = True, **more: Any
) -> Any:
    background: list[Background] = []
    chosen = settings or ServerSettings()
    store = BatchStore(str(folder), chosen.limits, lambda: 1000.0)
    async with AsyncExitStack() as stack:
        more |= {"batch_store": store, "background": background}
        app = await stack.enter_async_context(application(chosen, engine, **more))
        if run:
            await stack.enter_async_context(background[0]())
        yield app
