"""How likely a kept state is to be wanted again, learned from what became of others like it.

Like: kept for the same reason, hit as often so far, passed over as often since. Counts are aged, so that what is
learned follows the traffic. What was evicted and then wanted counts as wanted: a class that is never kept long enough
could otherwise never prove itself.
"""

from __future__ import annotations

from weft.memory.captures import ORIGINS, Origin

MOST_HITS = 3
MOST_PASSES = 2
# What a class is taken for until it has been seen: this many were wanted, of so many.
PRIOR_WANTED = 1.0
PRIOR_SEEN = 3.0
# Declared points are somebody's word that they will be wanted.
DECLARED_CHANCE = 0.5
MEMORY = 2048.0
# A class of which fewer are wanted is kept only now and then, to notice when that changes.
SELDOM = 0.02
TRIAL = 8

_PLACE = {origin: place for place, origin in enumerate(ORIGINS)}
_PER_HIT = MOST_PASSES + 1
_PER_ORIGIN = (MOST_HITS + 1) * _PER_HIT


def class_of(origin: Origin, hits: int, passes: int) -> int:
    """
    >>> class_of(Origin.DECLARED, 0, 0), class_of(Origin.DECLARED, 9, 9)
    (0, 11)
    """
    return _PLACE[origin] * _PER_ORIGIN + min(hits, MOST_HITS) * _PER_HIT + min(passes, MOST_PASSES)


class Popularity:
    def __init__(self) -> None:
        self._seen = [PRIOR_SEEN] * (_PER_ORIGIN * len(ORIGINS))
        self._wanted = [PRIOR_WANTED] * (_PER_ORIGIN * len(ORIGINS))
        self._skipped = [0] * len(ORIGINS)

    def entered(self, kind: int) -> None:
        self._seen[kind] += 1
        if self._seen[kind] > MEMORY:
            self._seen[kind] /= 2
            self._wanted[kind] /= 2

    def wanted(self, kind: int) -> None:
        """One of a class was hit, or would have been. It was of the classes with fewer passes before."""
        for each in range(kind - kind % _PER_HIT, kind + 1):
            self._wanted[each] += 1

    def chance(self, kind: int) -> float:
        """Of all that were ever in the class, how many were hit later."""
        learned = min(1.0, self._wanted[kind] / self._seen[kind])
        return max(learned, DECLARED_CHANCE) if kind < _PER_ORIGIN else learned

    def worth_a_try(self, origin: Origin) -> bool:
        """Are states of this origin wanted often enough to keep a new one? If not, one in a few is all the same."""
        if self.chance(class_of(origin, 0, 0)) >= SELDOM:
            return True
        place = _PLACE[origin]
        self._skipped[place] = (self._skipped[place] + 1) % TRIAL
        return self._skipped[place] == 0

    def table(self) -> dict[str, list[dict[str, float]]]:
        """What was learned, for people: by origin, one entry for each number of hits, without passes."""
        found: dict[str, list[dict[str, float]]] = {}
        for origin in ORIGINS:
            kinds = [class_of(origin, hits, 0) for hits in range(MOST_HITS + 1)]
            found[origin.value] = [
                {"seen": self._seen[kind] - PRIOR_SEEN, "chance": round(self.chance(kind), 4)} for kind in kinds
            ]
        return found
