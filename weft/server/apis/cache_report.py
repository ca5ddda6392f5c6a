"""`/cache`: the contents of the prefix cache as JSON, and dropping parts of it from all tiers.

`/cache/outline` has the branches of the cache for a picture: of all tenants for the admin, else of the caller's own.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.backends.backend import Backend
from weft.base.errors import InvalidField
from weft.base.tenants import TENANT_BYTES, tenant_digest
from weft.server.access.auth import Keys
from weft.server.stored.answers import StoredAnswers

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000
# Age in seconds up to which an outline is shown again.
OUTLINE_SECONDS = 1.0
# A prefix is named by at least this many hexadecimal letters of its key, as the report shows it.
NAME_LETTERS, KEY_LETTERS = 16, 64
MODEL = "model"
# Removes what the server keeps of a tenant, by its digest, or of all; returns how much, once it is overwritten.
DropKept = Callable[[bytes | None], Awaitable[int]]
CHOICES = ("tenant", "digest", "prefix", "all")


class Kept:
    """What a server keeps of tenants beside the cache: stored responses, and files and batches."""

    def __init__(self, stored: StoredAnswers | None = None, batches: DropKept | None = None) -> None:
        self._parts: dict[str, DropKept] = {} if batches is None else {"dropped_batch_files": batches}
        if stored is not None:
            self._parts["dropped_responses"] = stored.drop

    async def drop_as(self, request: Request, keys: Keys) -> dict[str, Any]:
        """Drop what is kept of the tenant that a query names, or of all; nothing if it names a prefix."""
        named = named_by(request, keys)
        return await self._drop(named["tenant"]) if named["prefix"] is None else {}

    async def _drop(self, tenant: bytes | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, drop in self._parts.items():
            try:
                found[name] = await drop(tenant)
            except OSError as error:
                found |= {"erased": False, "reason": f"cannot overwrite what is kept on disk: {error.strerror}"}
        return found


def routes(
    backend: Backend, keys: Keys, kept: Kept | None = None, retained: StoredAnswers | None = None
) -> list[Route]:
    """Return the routes, to be mounted behind the keys."""

    async def show(request: Request) -> Response:
        limit = limit_of(request.query_params.get("limit"))
        report = await backend.cache_report(max(1, limit))
        report["prefixes"] = report["prefixes"][:limit]
        names = {tenant_digest(tenant.salt).hex(): tenant.name for tenant in keys.tenants}
        for each in report.get("tenants", ()):
            each["name"] = names.get(each["digest"])
        return answer(report)

    async def drop(request: Request) -> Response:
        named = named_by(request, keys)
        # First, so that cancelled lines of batches use nothing that is dropped after them.
        more = {} if kept is None else await kept.drop_as(request, keys)
        found = await backend.drop(**named) | more
        if retained is not None and named["prefix"] is None:
            await retained.drop(named["tenant"])
        # A whole answer even so: what is no longer in memory cannot be hit.
        return answer(found, 200 if found.get("erased", True) else 500)

    return [Route("/cache", show, methods=["GET"]), Route("/cache", drop, methods=["DELETE"])]


def outline_routes(backend: Backend) -> list[Route]:
    """Return the route of the outline, to be mounted behind the keys. Every key may ask."""
    outlines = Outlines(backend)

    async def show(request: Request) -> Response:
        tenant = request.state.tenant
        return answer(visible(await outlines.latest(), tenant.admin, tenant_digest(tenant.salt).hex()))

    return [Route("/cache/outline", show, methods=["GET"])]


class Outlines:
    """The last outline, which is asked for again when it is old. So no number of clients costs the engine more."""

    def __init__(self, backend: Backend, clock: Callable[[], float] = time.monotonic) -> None:
        self._backend = backend
        self._clock = clock
        self._asking = asyncio.Lock()
        self._found: tuple[float, dict[str, Any]] | None = None

    async def latest(self) -> dict[str, Any]:
        async with self._asking:
            if self._found is None or self._clock() - self._found[0] >= OUTLINE_SECONDS:
                self._found = self._clock(), await self._backend.cache_report(0)
            return self._found[1]


def visible(outline: dict[str, Any], admin: bool, digest: str) -> dict[str, Any]:
    """Return the part of an outline that a tenant may see.

    >>> both = {"cells": 2, "cell_tokens": 64, "clock": 7, "branches": [{"tenant": "a"}, {"tenant": "b"}]}
    >>> visible(both, admin=False, digest="b")
    {'cell_tokens': 64, 'branches': [{'tenant': 'b'}]}
    """
    if admin:
        return outline
    own = [branch for branch in outline["branches"] if branch["tenant"] == digest]
    return {"cell_tokens": outline["cell_tokens"], "branches": own}


def answer(value: dict[str, Any], status: int = 200) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def limit_of(text: str | None) -> int:
    """Parse the number of prefixes to report.

    >>> limit_of(None), limit_of("7")
    (20, 7)
    """
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and int(text) <= MAX_LIMIT):
        raise InvalidField("limit", f"must be an integer from 0 to {MAX_LIMIT}, got {text[:32]!r}")
    return int(text)


def named_by(request: Request, keys: Keys) -> dict[str, bytes | None]:
    """Return what a request names to drop. Where there are several models, its query also names one."""
    return chosen({name: text for name, text in request.query_params.items() if name != MODEL}, keys)


def chosen(query: dict[str, str], keys: Keys) -> dict[str, bytes | None]:
    """Return what to drop: a tenant by its digest, prefixes by the beginning of a key, or everything."""
    if len(query) != 1 or not query.keys() <= set(CHOICES):
        raise InvalidField("query", f"must be one of {', '.join(CHOICES)}, such as ?tenant=NAME or ?all=true")
    ((name, text),) = query.items()
    if name == "all":
        if text != "true":
            raise InvalidField("all", f"must be true, got {text[:32]!r}")
        return {"tenant": None, "prefix": None}
    if name == "tenant":
        salts = [tenant.salt for tenant in keys.tenants if tenant.name == text]
        if not salts:
            raise InvalidField("tenant", f"must be the name of a key, got {text[:64]!r}; for a removed one pass digest")
        return {"tenant": tenant_digest(salts[0]), "prefix": None}
    if name == "digest":
        return {"tenant": hexadecimal("digest", text, 2 * TENANT_BYTES, 2 * TENANT_BYTES), "prefix": None}
    return {"tenant": None, "prefix": hexadecimal("prefix", text, NAME_LETTERS, KEY_LETTERS)}


def hexadecimal(name: str, text: str, least: int, most: int) -> bytes:
    """
    >>> hexadecimal("digest", "00ff", 2, 4)
    b'\\x00\\xff'
    """
    if not least <= len(text) <= most or len(text) % 2 or not re.fullmatch(r"[0-9a-f]+", text):
        bounds = f"{least}" if least == most else f"{least} to {most}"
        raise InvalidField(name, f"must be {bounds} hexadecimal digits, as GET /cache shows them, got {text[:80]!r}")
    return bytes.fromhex(text)
