"""Turns the constraints of a body into one grammar. Checks sizes; compiles nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from weft.base.errors import InvalidField, RequestError
from weft.base.grammar import Grammar
from weft.server.settings import Limits
from weft.server.texts.bodies import check_items, check_regex, check_schema, read_json
from weft.text.grammar_source import FIELDS, MAX_CHOICES, source_of

if TYPE_CHECKING:
    from weft.server.texts.prompt_builder import PromptBuilder
    from weft.server.texts.schemas import FormFields, ResponseFormat, StructuredOutputs


@dataclass(frozen=True, slots=True)
class Form:
    """The form of an answer, and the field of the body that sets it."""

    grammar: Grammar
    field: str

    def within(self, grammar: Grammar) -> Form:
        """Return the same form embedded in another grammar."""
        return replace(self, grammar=grammar)

    def named(self, error: RequestError) -> RequestError:
        """Return an error about the grammar as a client error on its field; return other errors unchanged."""
        if error.field not in ("grammar", FIELDS[self.grammar.kind]):
            return error
        return InvalidField(self.field, error.complaint)


def with_source(grammar: Grammar) -> Grammar:
    """Return a grammar as the compiler takes it: checked and translated here, not next to the engine's steps."""
    return Grammar(grammar.kind, "", source_of(grammar))


def prepared_grammar(builder: PromptBuilder, data: bytes) -> bytes:
    """Check and translate a grammar in a worker process."""
    return msgspec.msgpack.encode(with_source(msgspec.msgpack.decode(data, type=Grammar)))


def form_of(body: FormFields, limits: Limits) -> Form | None:
    """Return the form that a body asks for, if any."""
    found = [
        from_response_format(body.response_format, limits),
        from_structured(body.structured_outputs, limits),
        from_json("guided_json", body.guided_json, limits),
        from_regex("guided_regex", body.guided_regex, limits),
        from_choice("guided_choice", body.guided_choice, limits),
        from_grammar("guided_grammar", body.guided_grammar, limits),
        from_regex("regex", body.regex, limits),
        from_grammar("ebnf", body.ebnf, limits),
        from_json("json_schema", body.json_schema, limits),
        from_grammar("grammar", body.grammar, limits),
    ]
    return only(found)


def only(found: list[Form | None]) -> Form | None:
    """Return the only form of the list, if any; raise if there are several."""
    given = [form for form in found if form is not None]
    if len(given) > 1:
        raise InvalidField(given[1].field, f"and {given[0].field} exclude each other; pass only one of them")
    return given[0] if given else None


def from_schema(name: str, schema: Any, limits: Limits) -> Form:
    return Form(Grammar("json_schema", check_schema(name, schema, limits)), name)


def from_response_format(wanted: ResponseFormat | None, limits: Limits) -> Form | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Form(Grammar("json_object"), "response_format")
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise InvalidField("response_format.json_schema", "must have a schema")
    return from_schema("response_format.json_schema.schema", wanted.json_schema.schema, limits)


def from_structured(wanted: StructuredOutputs | None, limits: Limits) -> Form | None:
    if wanted is None:
        return None
    name = "structured_outputs"
    found = [
        from_json(f"{name}.json", wanted.json, limits),
        from_regex(f"{name}.regex", wanted.regex, limits),
        from_choice(f"{name}.choice", wanted.choice, limits),
        from_grammar(f"{name}.grammar", wanted.grammar, limits),
        Form(Grammar("json_object"), f"{name}.json_object") if wanted.json_object else None,
    ]
    given = [form for form in found if form is not None]
    if len(given) != 1:
        raise InvalidField(name, f"must have exactly one constraint, got {len(given)}")
    return given[0]


def from_json(name: str, schema: dict[str, Any] | str | None, limits: Limits) -> Form | None:
    """Return the form of a schema, which may be sent as text."""
    if schema is None:
        return None
    if isinstance(schema, str):
        if len(schema) > limits.schema_bytes:
            raise InvalidField(name, f"has {len(schema)} characters; the limit is {limits.schema_bytes}")
        try:
            schema = read_json(name, schema, limits.schema_depth)
        except ValueError:
            raise InvalidField(name, "must be a JSON schema, as an object or as text") from None
    return from_schema(name, schema, limits)


def from_regex(name: str, regex: str | None, limits: Limits) -> Form | None:
    return None if regex is None else Form(Grammar("regex", check_regex(name, regex, limits)), name)


def from_choice(name: str, choices: list[str] | None, limits: Limits) -> Form | None:
    if choices is None:
        return None
    check_items(name, choices, MAX_CHOICES)
    text = json.dumps(choices)
    if not choices or len(text) > limits.schema_bytes:
        raise InvalidField(name, f"must have 1 to {MAX_CHOICES} strings of at most {limits.schema_bytes} bytes in all")
    return Form(Grammar("choice", text), name)


def from_grammar(name: str, text: str | None, limits: Limits) -> Form | None:
    if text is None:
        return None
    if not 0 < len(text) <= limits.schema_bytes:
        raise InvalidField(name, f"must have 1 to {limits.schema_bytes} characters, got {len(text)}")
    return Form(Grammar("lark", text), name)
