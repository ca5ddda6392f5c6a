"""Responses with memory: what `previous_response_id` stands for, and the routes that show and remove a response."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.answers.followed import FollowedAnswer
from weft.base.errors import InvalidField, RequestError
from weft.base.tenants import tenant_digest
from weft.server.access.auth import Tenant
from weft.server.front import Front, ServerSide, new_name
from weft.server.http.errors import json_response
from weft.server.stored.answers import StoredAnswer, StoredAnswers, as_bytes
from weft.server.texts.bodies import check_depth

NO_MEMORY = "needs a server with --responses-memory; send the whole conversation as `input`"
PREVIOUS = b'"previous_response_id"'
Items = list[msgspec.Raw]


class Shown(msgspec.Struct):
    """The fields of a body that decide on what is before it; without an input, that is empty."""

    previous_response_id: str | None = None
    input: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


def need_stored(front: ServerSide, field: str) -> StoredAnswers:
    if front.stored is None:
        raise InvalidField(field, NO_MEMORY)
    return front.stored


def continued(front: Front, data: bytes, tenant: Tenant) -> tuple[bytes, StoredAnswer | None]:
    """Return a body with the whole conversation as its input, and the response that it goes on with, if it does."""
    if PREVIOUS not in data:
        return data, None
    check_depth(data, front.limits.json_depth)
    check_utf8(data)
    try:
        shown = msgspec.json.decode(data, type=Shown)
    except msgspec.MsgspecError:
        return data, None  # the usual decoding names what is wrong
    if shown.previous_response_id is None or bytes(shown.input).lstrip()[:1] not in (b'"', b"["):
        return data, None
    before = need_stored(front, "previous_response_id").find(shown.previous_response_id, tenant, "previous_response_id")
    if not before.body:
        raise InvalidField("previous_response_id", "must name a response; a fork is continued with /v1/fork")
    fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    fields["input"] = msgspec.Raw(msgspec.json.encode([*conversation(before), *items_of(shown.input)]))
    found = msgspec.json.encode(fields)
    if len(found) > front.limits.body_bytes:
        most = front.limits.body_bytes
        raise RequestError(f"the conversation has {len(found)} bytes with what is before it; the limit is {most}", 413)
    return found, before


def conversation(stored: StoredAnswer) -> Items:
    """Return the items up to the end of a response."""
    parts = (stored.earlier, stored.items, stored.output)
    return [item for part in parts for item in msgspec.json.decode(part, type=Items)]


def items_of(value: msgspec.Raw) -> Items:
    """Return a body's input as items: a text is one message."""
    raw = bytes(value)
    if raw.lstrip()[:1] != b'"':
        return msgspec.json.decode(raw, type=Items)
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": msgspec.json.decode(raw)}]}
    return [msgspec.Raw(msgspec.json.encode(message))]


def check_utf8(data: bytes) -> None:
    """Refuse a body whose unknown fields are no text either: they are stored, or sent on, with the others."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the body must be UTF-8; byte {error.start} is not") from None


def own_items(data: bytes) -> bytes:
    """Return the items that a body as it was sent adds to the conversation, each with an id."""
    check_utf8(data)
    try:
        found = [msgspec.json.decode(item) for item in items_of(msgspec.json.decode(data, type=Shown).input)]
    except msgspec.MsgspecError as error:
        raise InvalidField("input", f"cannot be stored: {error}") from None
    for item in found:
        item.setdefault("id", new_name("msg_"))
    return msgspec.json.encode(found)


def keep(
    front: Front,
    tenant: Tenant,
    body: dict[str, Any],
    items: bytes,
    cache_salt: str | None,
    before: StoredAnswer | None,
    answer: FollowedAnswer,
) -> None:
    """Store a response with its conversation, whose own part are the `items`, and its tokens."""
    assert front.stored is not None
    front.stored.add(
        StoredAnswer(
            id=body["id"],
            tenant=tenant_digest(tenant.salt),
            model=front.model_name,
            created=float(body["created_at"]),
            cache_salt=cache_salt,
            tokens=as_bytes(answer.request.prompt),
            answers=[as_bytes(answer.answer.tokens)],
            earlier=b"[]" if before is None else msgspec.json.encode(conversation(before)),
            items=items,
            output=msgspec.json.encode(body["output"]),
            body=msgspec.json.encode(body),
        )
    )


def named(front: ServerSide, request: Request) -> StoredAnswer:
    found = need_stored(front, "id").find(request.path_params["name"], request.state.tenant)
    if not found.body:
        raise RequestError("id: this is a fork, not a response", 404, field="id")
    return found


async def show(front: ServerSide, request: Request) -> Response:
    return Response(named(front, request).body, media_type="application/json")


async def delete(front: ServerSide, request: Request) -> Response:
    stored, name = need_stored(front, "id"), request.path_params["name"]
    await stored.delete(name, request.state.tenant)
    return json_response({"id": name, "object": "response", "deleted": True})


async def input_items(front: ServerSide, request: Request) -> Response:
    """Show what a response was given: the conversation before it, and its own items."""
    found = named(front, request)
    items = [*msgspec.json.decode(found.earlier), *msgspec.json.decode(found.items)]
    ids = [item.get("id") for item in items]
    return json_response(
        {
            "object": "list",
            "data": items,
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": False,
        }
    )
