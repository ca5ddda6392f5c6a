"""How likely drafts are to be accepted, as measured."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

# Weight of the past in the acceptance of a row and of all rows.
MEMORY = 0.98
MEMORY_OF_ALL = 0.998
# How many verified drafts an assumed prior counts for, and at most what all rows have learned: a row that believed its
# first few drafts would have too many or too few of them, by luck.
PRIOR_WEIGHT, OVERALL_WEIGHT = 2.0, 12.0

# Acceptance of first drafts below which a drafter that decodes cannot pay, whatever the load: one of a head takes a
# twentieth of a step of one row, and its verification more. A new head must be wrong 37 times to seem as bad.
LEAST_RATE = 0.03


class Acceptance:
    """Measured acceptance of one kind of drafts, by their place in the row. `prior` is assumed before any was verified.

    With an `overall` acceptance, of all sequences, that one is the prior.
    """

    def __init__(self, prior: float, overall: Acceptance | None = None, memory: float = MEMORY) -> None:
        self._prior = prior
        self._overall = overall
        self._memory = memory
        # By place: drafts that were accepted and refused where all before them were accepted. The prior counts for
        # some, and the past fades.
        self._accepted: list[float] = []
        self._refused: list[float] = []
        # Of the places that were verified, computed in advance: steps wait for drafts, not for what is learned.
        self._worth: tuple[float, ...] = ()

    def rate(self, place: int) -> float:
        """Return the probability that the draft at a place is accepted if all before it are."""
        if place < len(self._accepted):
            return self._accepted[place] / (self._accepted[place] + self._refused[place])
        if self._overall is not None:
            return self._overall.rate(place)
        # Places that were never verified are as good as the last one that was.
        return self.rate(len(self._accepted) - 1) if self._accepted else self._prior

    def _prior_weight(self, place: int) -> float:
        all_ = self._overall
        if all_ is None or place >= len(all_._accepted):
            return PRIOR_WEIGHT
        return min(OVERALL_WEIGHT, all_._accepted[place] + all_._refused[place])

    def worth(self, count: int) -> tuple[float, ...]:
        """Return for each of `count` drafts the probability that it and all before it are accepted."""
        found = self._worth[:count]
        if len(found) < count:
            value = found[-1] if found else 1.0
            rates = (self.rate(place) for place in range(len(found), count))
            found += tuple(accumulate(rates, mul, initial=value))[1:]
        return found

    def note(self, drafts: int, accepted: int) -> None:
        """Record a verified row. Drafts after the first refused one say nothing."""
        seen = min(drafts, accepted + 1)
        for place in range(len(self._accepted), seen):
            prior, weight = self.rate(place), self._prior_weight(place)
            self._accepted.append(weight * prior)
            self._refused.append(weight * (1 - prior))
        for place in range(seen):
            self._accepted[place] = self._memory * self._accepted[place] + (place < accepted)
            self._refused[place] = self._memory * self._refused[place] + (place == accepted)
        counted = zip(self._accepted, self._refused, strict=True)
        self._worth = tuple(accumulate((right / (right + wrong) for right, wrong in counted), mul))
