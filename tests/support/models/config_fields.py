"""Fields of configurations."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.support.models.engines import FAMILIES
from tests.support.models.oracle import config_of


@cache
def fields_of(family: str) -> dict[str, Any]:
    tiny = FAMILIES[family]
    return config_of(tiny) | tiny.published
