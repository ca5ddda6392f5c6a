"""`/cache`: the contents of the prefix cache as JSON: totals, and the largest shared prefixes with resume points."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.base.errors import InvalidField
from weft.server.backend import Backend

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000


def routes(backend: Backend) -> list[Route]:
    """Return the routes, to be mounted behind the keys."""

    async def show(request: Request) -> Response:
        report = await backend.cache_report(limit_of(request.query_params.get("limit")))
        return Response(
            msgspec.json.encode(report), media_type="application/json", headers={"cache-control": "no-store"}
        )

    return [Route("/cache", show, methods=["GET"])]


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
