"""Suggests what a misspelt name may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

CUTOFF = 0.6


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return a hint to append to an error, empty if no known name is close.

    >>> did_you_mean("--max-tokns", ["--max-tokens", "--model"]), did_you_mean("fly", ["serve"])
    ('; did you mean --max-tokens?', '')
    """
    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(given.lower(), by_lower, n=1, cutoff=CUTOFF)
    return f"; did you mean {by_lower[close[0]]}?" if close else ""
