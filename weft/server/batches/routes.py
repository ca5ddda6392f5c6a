"""The routes of files and batches, as in OpenAI's API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from weft.base.errors import InvalidField, RequestError
from weft.server.batches.lines import ENDPOINTS
from weft.server.batches.runner import BatchRunner
from weft.server.batches.store import PURPOSES, Shelf, StoredBatch, StoredFile, new_id
from weft.server.batches.upload import read_upload
from weft.server.http.errors import json_response
from weft.server.http.receiving import Receiving
from weft.server.settings import Limits
from weft.server.texts.bodies import check_items, read

MAX_PAGE = 100
# A client may ask for this many, as in OpenAI's API, and gets a page.
MAX_ASKED = 10_000
Metadata = dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]]
Listed = StoredFile | StoredBatch


class CreateBatch(msgspec.Struct, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"] = "24h"
    metadata: Metadata | None = None


class BatchRoutes:
    """Handlers of all routes; each sees only what belongs to the caller's key."""

    def __init__(self, runner: BatchRunner, receiving: Receiving, limits: Limits) -> None:
        self._runner = runner
        self._receiving = receiving
        self._limits = limits
        self._held_bytes = 0

    def routes(self) -> list[Route]:
        table: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("/v1/files", "POST", self.upload),
            ("/v1/files", "GET", self.files),
            ("/v1/files/{name}", "GET", self.file),
            ("/v1/files/{name}", "DELETE", self.delete),
            ("/v1/files/{name}/content", "GET", self.content),
            ("/v1/batches", "POST", self.create),
            ("/v1/batches", "GET", self.batches),
            ("/v1/batches/{name}", "GET", self.batch),
            ("/v1/batches/{name}/cancel", "POST", self.cancel),
        ]
        return [Route(path, handler, methods=[method]) for path, method, handler in table]

    def _shelf(self, request: Request) -> Shelf:
        return self._runner.store.shelf(request.state.tenant)

    async def upload(self, request: Request) -> Response:
        body = await self._receiving.read_body(request, self._limits.batch_file_bytes)
        kind, shelf = request.headers.get("content-type", ""), self._shelf(request)
        if self._held_bytes and self._held_bytes + len(body) > self._limits.waiting_bytes:
            raise RequestError("the server is keeping too many files at once; try again later", 503)
        self._held_bytes += len(body)
        try:
            # One after another, in a thread: a disk may be slow, and the bounds count what is there.
            async with self._runner.keeping:
                return json_response(await asyncio.to_thread(self._kept, shelf, kind, body))
        finally:
            self._held_bytes -= len(body)

    def _kept(self, shelf: Shelf, kind: str, body: bytes) -> StoredFile:
        found = read_upload(kind, body)
        return shelf.add_file(found.data, found.filename, found.purpose, self._runner.store.now())

    async def files(self, request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        if purpose is not None and purpose not in PURPOSES:
            raise InvalidField("purpose", f"must be one of {', '.join(PURPOSES)}, got {purpose!r:.40}")
        known = await asyncio.to_thread(self._shelf(request).files)
        found = [each for each in known if purpose in (None, each.purpose)]
        return json_response(page(request, found))

    async def file(self, request: Request) -> Response:
        return json_response(self._shelf(request).file(request.path_params["name"]))

    async def delete(self, request: Request) -> Response:
        name = request.path_params["name"]
        await asyncio.to_thread(self._shelf(request).delete_file, name)
        return json_response({"id": name, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        shelf = self._shelf(request)
        file = shelf.file(request.path_params["name"])
        # Never shown as a page: a browser saves it.
        headers = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
        return FileResponse(shelf.path(file.id, "data"), headers=headers, media_type="application/jsonl")

    async def create(self, request: Request) -> Response:
        body = await read(request, CreateBatch, self._receiving)
        if body.endpoint not in ENDPOINTS:
            raise InvalidField("endpoint", f"must be one of {', '.join(ENDPOINTS)}, got {body.endpoint!r:.80}")
        check_items("metadata", body.metadata, 16)
        batch = StoredBatch(
            id=new_id("batch_"),
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            created_at=self._runner.store.now(),
            status="validating",
            metadata=body.metadata,
        )
        return json_response(await self._runner.create(request.state.tenant, batch))

    async def batches(self, request: Request) -> Response:
        found = [self._runner.shown(each) for each in await asyncio.to_thread(self._shelf(request).batches)]
        return json_response(page(request, found))

    async def batch(self, request: Request) -> Response:
        return json_response(self._runner.shown(self._shelf(request).batch(request.path_params["name"])))

    async def cancel(self, request: Request) -> Response:
        return json_response(self._runner.cancel(request.state.tenant, request.path_params["name"]))


def page(request: Request, found: list[Any]) -> dict[str, Any]:
    """Return the newest of a list after `after`, up to `limit`."""
    newest = found[::-1]
    asked = request.query_params.get("limit", "20")
    if not (asked.isascii() and asked.isdigit() and 1 <= int(asked[:8]) <= MAX_ASKED):
        raise InvalidField("limit", f"must be from 1 to {MAX_ASKED}, got {asked!r:.20}")
    after = request.query_params.get("after")
    names = [each.id for each in newest]
    if after is not None and after not in names:
        raise InvalidField("after", f"must be an id of this list, got {after!r:.60}")
    start = 0 if after is None else names.index(after) + 1
    shown = newest[start : start + min(int(asked[:8]), MAX_PAGE)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": start + len(shown) < len(newest),
    }
