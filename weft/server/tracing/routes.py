"""`/debug/events`, a stream of what requests and steps do, and `/debug/requests/ID`, what became of one."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from weft.server.front import Front
from weft.server.http.errors import json_response
from weft.server.http.sse import EventStream, Silence
from weft.server.tracing.records import digest_of

# Between two comments of a silent stream, without which a client that has vanished would not be noticed.
HEARTBEAT_SECONDS = 15.0


async def events(front: Front, request: Request) -> Response:
    tenant = request.state.tenant
    listener = front.traces.listen(digest_of(tenant), tenant.admin)
    silence = Silence(front.settings.keep_alive_seconds or HEARTBEAT_SECONDS)
    return EventStream(listener.batches(), listener.close, silence=silence)


async def show(front: Front, request: Request) -> Response:
    return json_response(await front.requests.find(request.path_params["name"], request.state.tenant))
