"""Fields of a quantisation configuration, which come from outside: of the right kind and bounded, or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from weft.base.errors import ModelError

# Names in a list, and characters of one.
MOST_NAMES, MOST_CHARACTERS = 100_000, 500


def mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ModelError(f"quantization_config: {name} must be an object, got {shown(value)}")
    return value


def names(fields: Mapping[str, Any], name: str) -> list[str]:
    value = fields.get(name) or []
    valid = isinstance(value, list) and len(value) <= MOST_NAMES
    if not valid or not all(isinstance(each, str) and len(each) <= MOST_CHARACTERS for each in value):
        raise ModelError(f"quantization_config: {name} must be a list of names, got {shown(value)}")
    return list(value)


def block(fields: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    value = fields.get(name)
    if value is None:
        return None
    sizes = [count(each) for each in value] if isinstance(value, list) else []
    if len(sizes) != 2 or None in sizes:
        raise ModelError(f"quantization_config: {name} must be two sizes, got {shown(value)}")
    return sizes[0] or 1, sizes[1] or 1


def count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 20 else None


def text(value: object) -> str | None:
    return value[:100] if isinstance(value, str) else None


def shown(value: object) -> str:
    return json.dumps(value, default=str)[:100]
