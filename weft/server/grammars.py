"""From what bodies say about the form of an answer to one grammar. Checks sizes; compiles nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from weft.base.grammar import Grammar
from weft.server.errors import FieldError
from weft.server.limits import check_items, check_regex, check_schema
from weft.server.settings import Limits

if TYPE_CHECKING:
    from weft.server.schemas import ResponseFormat, StructuredOutputs


def from_schema(name: str, schema: Any, limits: Limits) -> Grammar:
    return Grammar("json_schema", check_schema(name, schema, limits))


def from_response_format(wanted: ResponseFormat | None, limits: Limits) -> Grammar | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar("json_object")
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise FieldError("response_format.json_schema", "must hold a schema")
    return from_schema("response_format.json_schema.schema", wanted.json_schema.schema, limits)


def from_structured(wanted: StructuredOutputs | None, limits: Limits) -> Grammar | None:
    if wanted is None:
        return None
    found: list[Grammar] = []
    if wanted.json is not None:
        found.append(from_schema("structured_outputs.json", parsed("structured_outputs.json", wanted.json), limits))
    if wanted.regex is not None:
        found.append(Grammar("regex", check_regex("structured_outputs.regex", wanted.regex, limits)))
    if wanted.choice is not None:
        found.append(choice("structured_outputs.choice", wanted.choice, limits))
    if wanted.grammar is not None:
        found.append(lark("structured_outputs.grammar", wanted.grammar, limits))
    if wanted.json_object:
        found.append(Grammar("json_object"))
    if len(found) != 1:
        raise FieldError("structured_outputs", f"must hold exactly one constraint, got {len(found)}")
    return found[0]


def parsed(name: str, schema: dict[str, Any] | str) -> Any:
    """A schema that may have been sent as text."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError):
        raise FieldError(name, "must be a JSON schema, or one as text") from None


def choice(name: str, choices: list[str], limits: Limits) -> Grammar:
    check_items(name, choices, 1024)
    text = json.dumps(choices)
    if not choices or len(text) > limits.schema_bytes:
        raise FieldError(name, f"must hold 1 to 1024 texts of at most {limits.schema_bytes} bytes together")
    return Grammar("choice", text)


def lark(name: str, text: str, limits: Limits) -> Grammar:
    if not 0 < len(text) <= limits.schema_bytes:
        raise FieldError(name, f"must have 1 to {limits.schema_bytes} characters, got {len(text)}")
    return Grammar("lark", text)
