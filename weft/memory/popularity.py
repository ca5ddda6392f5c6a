"""Predicts how soon a kept state will be wanted again, from the history of similar states.

Similar states were kept for the same reason, hit as often so far, and passed over as often since. For every such class,
this counts how many were wanted how long after their last use, in lookups. Counts decay, so that the estimate follows
the traffic. A state that was evicted and then wanted counts as wanted: otherwise a class that is never kept long enough
could never prove itself.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from operator import mul

from weft.memory.captures import ORIGINS, Origin

MOST_HITS = 5
MOST_PASSES = 2
# Starts of age intervals, in lookups: each is about half as long again as the previous one. Short ones matter when
# memory holds a handful of points and everything is evicted young.
AGES = (0, 1, 2, 3, 4, 6, 8, *(length << power for power in range(10) for length in (12, 16)), 12 << 10)
LENGTHS = [end - start for start, end in pairwise((*AGES, 2 * AGES[-1]))]
# Probabilities at an age are averaged with those of this many ages on either side, nearer ones weighing more.
NEIGHBOURS = 4
_WEIGHTS = [NEIGHBOURS + 1 - abs(place - NEIGHBOURS) for place in range(2 * NEIGHBOURS + 1)]
# Prior: of this many points one is wanted, and one more for every hit that they had, equally likely at any age.
PRIOR_WANTED = 1.0
PRIOR_SEEN = 3.0
# The caller has declared that these points will be wanted.
DECLARED_CHANCE = 0.5
MEMORY = 2048.0
# A class with fewer hits is kept only now and then, to notice when that changes. While memory is free the threshold
# is higher, because a state that is not kept for good is still held as a candidate.
SELDOM, SELDOM_IN_FREE_MEMORY = 0.02, 0.04
TRIAL = 8
# Rates are recomputed after this many lookups.
REFRESH = 16

_PLACE = {origin: place for place, origin in enumerate(ORIGINS)}
_PER_HIT = MOST_PASSES + 1
_PER_ORIGIN = (MOST_HITS + 1) * _PER_HIT


def class_of(origin: Origin, hits: int, passes: int) -> int:
    """
    >>> class_of(Origin.DECLARED, 0, 0), class_of(Origin.DECLARED, 9, 9)
    (0, 17)
    """
    return _PLACE[origin] * _PER_ORIGIN + min(hits, MOST_HITS) * _PER_HIT + min(passes, MOST_PASSES)


def _alike(kind: int) -> int:
    """Return the class that combines all with as many hits and passes."""
    return _PER_ORIGIN * len(ORIGINS) + kind % _PER_ORIGIN


def age_bucket(age: int) -> int:
    """
    >>> [age_bucket(age) for age in (0, 7, 8, 12, 16, 8192, 1 << 20)]
    [0, 5, 6, 7, 8, 26, 27]
    """
    return bisect_right(AGES, age) - 1


def rates(lasted: list[float], wanted: list[float]) -> list[float]:
    """Return the hits per lookup that holding on brings, by age, for the best time to hold on.

    `lasted` is the total number of lookups that points spent at each age, `wanted` how many were wanted then. Holding
    on from one age to another occupies memory until then, or until the point is wanted, and brings a hit with some
    probability on the way. The best ratio over all later ages is the value of holding on: Gittins' index.

    >>> rates([80.0, 40.0, 40.0], [0.0, 10.0, 0.0])
    [0.08333333333333333, 0.25, 0.0]
    """
    found, later = [0.0] * len(lasted), list[tuple[float, float]]()
    for age in reversed(range(len(lasted))):
        brought, held = wanted[age], lasted[age]
        # Include later ages as long as that improves the ratio.
        while later and later[-1][0] * held > brought * later[-1][1]:
            more, longer = later.pop()
            brought, held = brought + more, held + longer
        later.append((brought, held))
        found[age] = brought / held
    return found


def smoothed(lasted: list[float], wanted: list[float]) -> list[float]:
    """Return hits by age, smoothed as if probabilities changed little between ages: averaged with the neighbours'.

    >>> [round(count, 1) for count in smoothed([1.0] * 9, [0.0] * 4 + [25.0] + [0.0] * 4)]
    [1.7, 2.6, 3.4, 4.2, 5.0, 4.2, 3.4, 2.6, 1.7]
    """
    found = []
    for age, held in enumerate(lasted):
        first, weights = max(0, age - NEIGHBOURS), _WEIGHTS[max(0, NEIGHBOURS - age) :]
        # `map` ends with the shorter list.
        brought = sum(map(mul, weights, wanted[first:]))
        found.append(held * brought / sum(map(mul, weights, lasted[first:])))
    return found


class Popularity:
    def __init__(self) -> None:
        # One per class, then one per number of hits and passes, whatever the reason.
        count = _PER_ORIGIN * (len(ORIGINS) + 1)
        self._entered = [[0.0] * len(AGES) for _ in range(count)]
        self._wanted = [[0.0] * len(AGES) for _ in range(count)]
        self._total = [0.0] * count
        self._skipped = [0] * len(ORIGINS)
        self._rates: dict[int, list[float]] = {}
        self._lookups = 0

    def looked_up(self) -> None:
        self._lookups += 1
        if self._lookups % REFRESH == 0:
            self._rates.clear()

    def entered(self, kind: int, age: int = 0) -> None:
        """Count a point that enters a class at this age."""
        stretch = age_bucket(age)
        for each in (kind, _alike(kind)):
            self._entered[each][stretch] += 1
            self._total[each] += 1
            if self._total[each] > MEMORY:
                self._total[each] /= 2
                for counts in (self._entered[each], self._wanted[each]):
                    counts[:] = [count / 2 for count in counts]

    def wanted(self, kind: int, age: int = 0) -> None:
        """Count a hit of a class, or one that would have happened. The point was in the classes of fewer passes."""
        stretch = age_bucket(age)
        for each in range(kind - kind % _PER_HIT, kind + 1):
            self._wanted[each][stretch] += 1
            self._wanted[_alike(each)][stretch] += 1

    def chance(self, kind: int) -> float:
        """Return the share of all points ever in the class that were wanted later."""
        learned = min(1.0, (sum(self._wanted[kind]) + PRIOR_WANTED) / (self._total[kind] + PRIOR_SEEN))
        return max(learned, DECLARED_CHANCE) if kind < _PER_ORIGIN else learned

    def rate(self, kind: int, age: int) -> float:
        """Return the expected hits per lookup of holding on to a point of this class."""
        known = self._rates.get(kind)
        if known is None:
            reached, wanted = self._history(kind)
            lasted = [length * (some - less / 2) for length, some, less in zip(LENGTHS, reached, wanted, strict=True)]
            known = self._rates[kind] = rates(lasted, smoothed(lasted, wanted))
        return known[age_bucket(age)]

    def _history(self, kind: int) -> tuple[list[float], list[float]]:
        """Return the points at each age, and those wanted there; the less is known, the more similar classes weigh."""
        alike = _alike(kind)
        if kind == alike:
            prior = (PRIOR_WANTED + kind % _PER_ORIGIN // _PER_HIT) / len(AGES)
            before_reached, before_wanted, weight = [PRIOR_SEEN] * len(AGES), [prior] * len(AGES), 1.0
        else:
            before_reached, before_wanted = self._history(alike)
            weight = PRIOR_SEEN / before_reached[0]
        reached, left = [], 0.0
        for age, start in enumerate(AGES):
            # The caller declared these: none counts against them.
            left += self._entered[kind][age] if kind >= _PER_ORIGIN else 0.0
            # Recent points cannot have reached a high age.
            old_enough = max(0.0, 1 - start / (self._lookups + 1))
            reached.append(max(left * old_enough, self._wanted[kind][age]) + weight * before_reached[age])
            left -= self._wanted[kind][age]
        return reached, [own + weight * before for own, before in zip(self._wanted[kind], before_wanted, strict=True)]

    def worth_a_try(self, origin: Origin, seldom: float = SELDOM) -> bool:
        """Return whether states of this origin are wanted often enough to keep a new one; if not, keep one in a few."""
        if self.chance(class_of(origin, 0, 0)) >= seldom:
            return True
        place = _PLACE[origin]
        self._skipped[place] = (self._skipped[place] + 1) % TRIAL
        return self._skipped[place] == 0

    def table(self) -> dict[str, list[dict[str, float]]]:
        """Return what was learned, for people: by origin, one entry for each number of hits, without passes."""
        found: dict[str, list[dict[str, float]]] = {}
        for origin in ORIGINS:
            kinds = [class_of(origin, hits, 0) for hits in range(MOST_HITS + 1)]
            found[origin.value] = [{"seen": self._total[kind], "chance": round(self.chance(kind), 4)} for kind in kinds]
        return found
