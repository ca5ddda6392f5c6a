"""Durations as people write them: seconds, or numbers with units such as 1h30m."""

from __future__ import annotations

import math
import re

UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h)")


def duration_seconds(text: str) -> float:
    """Return seconds; any negative duration is infinite. Raises `ValueError` for other texts.

    >>> duration_seconds("90"), duration_seconds("1h30m"), duration_seconds("500ms"), duration_seconds("-1")
    (90.0, 5400.0, 0.5, inf)
    """
    text = text.strip()
    negative, text = text.startswith("-"), text.removeprefix("-")
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text):
        found = float(text)
    elif text and re.fullmatch(f"(?:{PART.pattern})+", text):
        found = sum(float(number) * UNITS[unit] for number, unit in PART.findall(text))
    else:
        raise ValueError(f"{text!r} is no duration")
    return math.inf if negative and found else found
