"""A schema, and the tokens that a grammar allows."""

from __future__ import annotations

import json

import numpy as np

from weft.base.grammar import Grammar
from weft.text.grammar import Guide

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
SCHEMA = Grammar("json_schema", json.dumps(PERSON))


def allowed(guide: Guide) -> list[int]:
    return np.flatnonzero(np.unpackbits(guide.mask.view(np.uint8), bitorder="little")).tolist()
