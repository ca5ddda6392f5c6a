"""Drafts of a row that follows a grammar: what is forced, the next choice, what is forced after it, and so on.

Each draft of such a row may come from something else, so each source has its own acceptance, whatever its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from weft.base.constraint import LookAhead

# Sources of drafts, and the acceptance that is assumed before any was verified.
SOURCES = {
    "forced": 0.99,
    "predicted": 0.8,
    "long match": 0.8,
    "match": 0.4,
    "own pair": 0.6,
    "own pair again": 0.85,
    "other pair": 0.4,
    "other pair again": 0.55,
    "own token": 0.5,
    "own token again": 0.7,
    "other token": 0.35,
    "other token again": 0.4,
}
# The source of drafts from a text, by their kind where there is no grammar.
SOURCE_OF = {"prediction": "predicted", "long suffix": "long match", "suffix": "match"}
# The drafter of each source, if it is not a habit.
DRAFTER_OF = {"forced": "grammar", "predicted": "prediction", "long match": "suffix", "match": "suffix"}
# Drafts that are less likely than this are not looked at.
LEAST_WORTH = 0.1


class Draft(NamedTuple):
    token: int
    source: str


class Spelled(NamedTuple):
    """Drafts, what each of them comes from, and the probability that it and all before it are accepted."""

    tokens: tuple[int, ...]
    sources: tuple[str, ...]
    worth: tuple[float, ...]


def spelled(
    ahead: LookAhead, most: int, draft: Callable[[list[int]], Draft | None], rate: Callable[[str], float]
) -> Spelled:
    """Return up to `most` drafts: forced tokens, and between them what `draft` returns after the drafts before.

    The model may spell what is forced otherwise. Drafts end where nothing is known, or where they are unlikely.
    """
    tokens: list[int] = []
    sources: list[str] = []
    worth: list[float] = []
    likely = 1.0
    while len(tokens) < most and likely >= LEAST_WORTH:
        token = ahead.forced()
        found = draft(tokens) if token is None else Draft(token, "forced")
        if found is None or not ahead.take(found.token):
            break
        likely *= rate(found.source)
        tokens.append(found.token)
        sources.append(found.source)
        worth.append(likely)
    return Spelled(tuple(tokens), tuple(sources), tuple(worth))
