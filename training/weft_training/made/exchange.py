"""What a maker of dialogues returns: one exchange or several that belong together."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from random import Random

Exchange = tuple[str, str]  # what the user says, what the assistant answers
Maker = Callable[[Random], list[Exchange]]


def one(make: Callable[[Random], Exchange]) -> Maker:
    """A maker of a single exchange as a maker of several."""

    @wraps(make)
    def several(random: Random) -> list[Exchange]:
        return [make(random)]

    return several
