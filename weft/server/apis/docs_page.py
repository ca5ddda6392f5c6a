"""GET /docs: the OpenAPI document as a page for people. It has no scripts, and loads nothing."""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft.server.apis.openapi import document
from weft.server.front import ServerSide

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
summary { cursor: pointer; padding: .3rem 0 } code { background: #f3f3f3; padding: 0 .25rem }
b { display: inline-block; min-width: 4rem; font-family: monospace } table { border-collapse: collapse; margin: .5rem }
td { border-bottom: 1px solid #ddd; padding: .15rem .75rem .15rem 0; vertical-align: top }
"""
HASH = b64encode(sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{HASH}'; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


async def docs(front: ServerSide, request: Request) -> Response:
    return Response(page(front.model_name), headers=HEADERS, media_type="text/html")


@cache
def page(title: str) -> str:
    found = document(title)
    about = escape(found["info"]["title"])
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>{about}</title><style>{STYLE}</style>"]
    parts.append(f"<h1>{about}</h1><p>Version {escape(found['info']['version'])}. The same for programs: ")
    parts.append("<code>/openapi.json</code>.</p>")
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            head = f"<b>{method.upper()}</b> <code>{escape(path)}</code> {escape(operation['summary'])}"
            parts.append(f"<details><summary>{head}</summary>{body_of(operation, found)}</details>")
    return "".join(parts)


def body_of(operation: dict[str, Any], found: dict[str, Any]) -> str:
    """Return the fields of a body as a table."""
    if "requestBody" not in operation:
        return "<p>No body.</p>"
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    kind = found["components"]["schemas"].get(schema.get("$ref", "").rpartition("/")[2], schema)
    needed = kind.get("required", ())
    rows = [
        f"<tr><td><code>{escape(name)}</code><td>{escape(type_of(field))}<td>{'required' if name in needed else ''}"
        for name, field in kind.get("properties", {}).items()
    ]
    return f"<table>{''.join(rows)}</table>"


def type_of(schema: dict[str, Any]) -> str:
    """Return a type in words.

    >>> type_of({"anyOf": [{"type": "string"}, {"type": "null"}]})
    'string'
    >>> type_of({"type": "array", "items": {"$ref": "#/a/B"}})
    'list of B'
    """
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(type_of(each) for each in schema["anyOf"] if each.get("type") != "null"))
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {type_of(schema.get('items') or {})}"
    return str(schema.get("type", "any JSON"))
