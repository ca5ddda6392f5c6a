"""Delivers the answers of a generation to the client, for any API: as one body or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft.server.access_log import Record
from weft.server.front import Front
from weft.server.generation import Generation
from weft.server.http.sse import DONE, EVENTS, KEEP_ALIVE, EventStream, Silence, error_event, while_connected

# A JSON object in each line, as in Ollama's API.
LINES = "application/x-ndjson"


async def deliver(
    front: Front,
    request: Request,
    generation: Generation,
    events: AsyncIterator[bytes] | None,
    whole: Callable[[], Any],
    *,
    failed: Callable[[Exception], bytes] = error_event,
    done: bytes = DONE,
    keep_alive: bytes = KEEP_ALIVE,
    media_type: str = EVENTS,
) -> Response:
    """Send the events, or, without events, the whole answer once it is complete. Closes the generation."""
    record: Record = request.state.record
    record.generation = generation
    generation.request_id = record.id
    if events is not None:
        silence = Silence(front.settings.keep_alive_seconds, event=keep_alive)

        def noted(error: Exception) -> bytes:
            record.note(error)
            return failed(error)

        return EventStream(events, generation.close, noted, done, silence, record.ended, media_type)
    try:
        await while_connected(request, generation.collect())
    finally:
        generation.close()
    return await front.shaped(generation, whole)
