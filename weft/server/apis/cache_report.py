"""`/cache`: the contents of the prefix cache as JSON, and dropping parts of it from all tiers."""

from __future__ import annotations

import re
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
# A prefix is named by at least this many hexadecimal letters of its key, as the report shows it.
NAME_LETTERS, KEY_LETTERS = 16, 64
CHOICES = ("tenant", "digest", "prefix", "all")


def routes(backend: Backend, keys: Keys, stored: StoredAnswers | None = None) -> list[Route]:
    """Return the routes, to be mounted behind the keys."""

    async def show(request: Request) -> Response:
        report = await backend.cache_report(limit_of(request.query_params.get("limit")))
        names = {tenant_digest(tenant.salt).hex(): tenant.name for tenant in keys.tenants}
        for each in report.get("tenants", ()):
            each["name"] = names.get(each["digest"])
        return answer(report)

    async def drop(request: Request) -> Response:
        named = chosen(dict(request.query_params), keys)
        found = await backend.drop(**named)
        if stored is not None and named["prefix"] is None:
            found["dropped_responses"] = await stored.drop(named["tenant"])
        # A whole answer even so: what is no longer in memory cannot be hit.
        return answer(found, 200 if found.get("erased", True) else 500)

    return [Route("/cache", show, methods=["GET"]), Route("/cache", drop, methods=["DELETE"])]


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
