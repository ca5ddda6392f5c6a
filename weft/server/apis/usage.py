"""GET /v1/usage: what each key used, by day. For the admin."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.base.errors import InvalidField
from weft.server.access.usage import NO_KEY, UsageBook
from weft.server.http.errors import json_response


def routes(book: UsageBook) -> list[Route]:
    """Return the route, to be mounted behind the admin key."""

    async def usage(request: Request) -> Response:
        first, last = (day_of(request, name) for name in ("start", "end"))
        rows = list(rows_of(book, first or "", last or "9999-12-31", request.query_params.get("key")))
        return json_response({"object": "list", "data": rows})

    return [Route("/v1/usage", usage, methods=["GET"])]


def rows_of(book: UsageBook, first: str, last: str, key: str | None) -> Iterator[dict[str, Any]]:
    for day in sorted(book.days):
        if first <= day <= last:
            for name, usage in sorted(book.days[day].items()):
                if key in (None, name):
                    yield {"day": day, "key": None if name == NO_KEY else name, **msgspec.to_builtins(usage)}


def day_of(request: Request, name: str) -> str | None:
    given = request.query_params.get(name)
    if given is None:
        return None
    try:
        return date.fromisoformat(given[:16]).isoformat()
    except ValueError:
        raise InvalidField(name, f"must be a day such as 2026-11-19, got {given!r:.40}") from None
