"""What a request asks to retain: which part of it is protected against eviction, and for how long."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

MOST_SECONDS = 86400.0
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
Seconds = Annotated[float, Meta(ge=0, le=MOST_SECONDS)]


def ttl_seconds(text: str) -> float | None:
    """Return the seconds of a `ttl` such as 5m or 1h; None if it is none, or more than a day.

    >>> ttl_seconds("5m"), ttl_seconds("1h"), ttl_seconds("25h"), ttl_seconds("5 minutes")
    (300.0, 3600.0, None, None)
    """
    found = re.fullmatch(r"([0-9]{1,6})([smh])", text)
    seconds = None if found is None else int(found[1]) * _UNITS[found[2]]
    return None if seconds is None or seconds > MOST_SECONDS else seconds


class Retain(msgspec.Struct, frozen=True, array_like=True):
    """Retain the first `tokens` of a request, or, with None, all of it and its answer, for these seconds.

    Zero seconds release everything that its tenant retains of it.
    """

    seconds: Seconds
    tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
