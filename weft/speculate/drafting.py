"""Which rows draft in a step, and how far: guesses of all drafters, weighed by their measured acceptance.

The expected number of tokens per unit of time decides. A draft after others is accepted only if all of them are, so
each next one is worth less; drafts of all rows are added in the order of their worth while the step's cost, by its
size, grows less than the tokens expected of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from weft.speculate.costs import LearnedCosts, StepCosts
from weft.speculate.suffix import LONGEST_COMPARED, Match, OwnText, Prediction, SharedTexts

# Acceptance of a draft that is assumed before any was verified, by drafter and length of the match.
PRIORS = {"prediction": 0.8, "grammar": 0.99, "suffix": 0.4, "long suffix": 0.8}
LONG_MATCH = 8
# Weight of the past in a row's acceptance, and how many verified drafts the prior counts for.
MEMORY = 0.9
PRIOR_WEIGHT = 2.0
# Steps without a draft after one that was refused at once: doubled each time, up to a bound.
FIRST_PAUSE, LONGEST_PAUSE = 1, 64


class Acceptance:
    """Measured acceptance of one kind of drafts of one sequence, by their place in the row."""

    def __init__(self, kind: str) -> None:
        self._prior = PRIORS.get(kind, 0.5)
        # By place: drafts that were accepted and refused where all before them were accepted. The prior counts for
        # some, and the past fades.
        self._accepted: list[float] = []
        self._refused: list[float] = []

    def worth(self, count: int) -> tuple[float, ...]:
        """Return for each of `count` drafts the probability that it and all before it are accepted."""
        rates = [
            accepted / (accepted + refused)
            for accepted, refused in zip(self._accepted[:count], self._refused[:count], strict=True)
        ]
        # Places that were never verified are as good as the last one that was.
        rates += [rates[-1] if rates else self._prior] * (count - len(rates))
        return tuple(accumulate(rates, mul))

    def note(self, drafts: int, accepted: int) -> None:
        """Record a verified row. Drafts after the first refused one say nothing."""
        seen = min(drafts, accepted + 1)
        missing = seen - len(self._accepted)
        self._accepted += [PRIOR_WEIGHT * self._prior] * missing
        self._refused += [PRIOR_WEIGHT * (1 - self._prior)] * missing
        for place in range(seen):
            self._accepted[place] = MEMORY * self._accepted[place] + (place < accepted)
            self._refused[place] = MEMORY * self._refused[place] + (place == accepted)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts for one row. `worth` is the probability that each of them and all before it are accepted."""

    drafter: str
    kind: str
    tokens: tuple[int, ...]
    worth: tuple[float, ...]

    def first(self, count: int) -> Proposal:
        """Return the first drafts of the proposal."""
        if count == len(self.tokens):
            return self
        return replace(self, tokens=self.tokens[:count], worth=self.worth[:count])


@dataclass(slots=True)
class DraftCounts:
    """Counts for metrics: drafts by drafter and position, rows that were not drafted by reason."""

    proposed: Counter[tuple[str, int]] = field(default_factory=Counter)
    accepted: Counter[tuple[str, int]] = field(default_factory=Counter)
    not_drafted: Counter[str] = field(default_factory=Counter)  # sequences, by reason

    def stats(self) -> dict[str, dict[str, int]]:
        """Return the counts with plain names: "suffix 1" are the first drafts of the drafter."""
        named = {
            "proposed": {f"{name} {place}": count for (name, place), count in self.proposed.items()},
            "accepted": {f"{name} {place}": count for (name, place), count in self.accepted.items()},
        }
        return named | {"not_drafted": dict(self.not_drafted)}


class SequenceDrafts:
    """The drafting of one sequence: its texts, and how well its drafts did. `most` bounds the drafts of a step."""

    def __init__(
        self,
        prompt: NDArray[np.int32],
        salt: bytes,
        most: int,
        prediction: NDArray[np.int32] | None = None,
        suffixes: bool = True,
    ) -> None:
        self.most = most
        self.salt = salt
        self._own = OwnText(prompt) if suffixes else None
        self._prediction = Prediction(prediction) if prediction is not None and len(prediction) else None
        self._acceptance: dict[str, Acceptance] = {}
        self._pause = FIRST_PAUSE
        self._skip = 0

    def propose(self, answer: list[int], most: int, shared: SharedTexts) -> Proposal | None:
        """Return up to `most` drafts to follow the answer, or None if there is no guess."""
        most = min(most, self.most)
        if most < 1:
            return None
        if self._prediction is not None and (match := self._prediction.match(answer, most)) is not None:
            return self._proposal("prediction", "prediction", match)
        if self._skip:
            self._skip -= 1
            return None
        match = self._match(answer, most, shared)
        if match is None or not match.tokens:
            return None
        return self._proposal("suffix", "long suffix" if match.length >= LONG_MATCH else "suffix", match)

    def spell(self, forced: Sequence[int], most: int) -> Proposal | None:
        """Return tokens that a grammar forces as drafts. The model may still spell the same text otherwise."""
        tokens = tuple(forced[: min(most, self.most)])
        return self._proposal("grammar", "grammar", Match(0, tokens)) if most > 0 and tokens else None

    def _match(self, answer: list[int], most: int, shared: SharedTexts) -> Match | None:
        """Return the longer of the matches in the sequence's own text and in those of its salt; its own if equal."""
        if self._own is None:
            return None
        self._own.extend(answer)
        key = self._own.key()
        if key is None:
            return None
        own, place = self._own.match(key, most), shared.place(self.salt, key)
        if place is None or (own is not None and own.length >= LONGEST_COMPARED):
            return own
        other = shared.match(place, self._own.last(LONGEST_COMPARED), most)
        if own is None or (other is not None and other.length > own.length):
            return other
        return own

    def _proposal(self, drafter: str, kind: str, match: Match) -> Proposal:
        acceptance = self._acceptance.setdefault(kind, Acceptance(kind))
        return Proposal(drafter, kind, match.tokens, acceptance.worth(len(match.tokens)))

    def verified(self, proposal: Proposal, accepted: int) -> None:
        """Learn from a verified row. After a draft that was refused at once, some steps go without."""
        self._acceptance.setdefault(proposal.kind, Acceptance(proposal.kind)).note(len(proposal.tokens), accepted)
        if accepted:
            self._pause = FIRST_PAUSE
        elif proposal.drafter == "suffix":
            self._skip = self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)


class Drafting:
    """Decides the drafts of each step, for all rows together. `most` bounds the drafts of a row.

    `shares`: finished texts are kept as drafts for later requests with the same salt.
    """

    def __init__(self, most: int, suffixes: bool = True, costs: StepCosts | None = None, shares: bool = True) -> None:
        self.most = most
        self.suffixes = suffixes
        self.shares = shares
        self.costs: StepCosts = LearnedCosts() if costs is None else costs
        self.shared = SharedTexts()
        self.counts = DraftCounts()

    def begin(
        self, prompt: NDArray[np.int32], salt: bytes, most: int | None, prediction: NDArray[np.int32] | None
    ) -> SequenceDrafts | None:
        """Return the drafting of a new sequence; None if it has none. `most` is the request's own bound."""
        bound = self.most if most is None else min(most, self.most)
        if bound < 1 or not (self.suffixes or prediction is not None):
            return None
        return SequenceDrafts(prompt, salt, bound, prediction, self.suffixes)

    def ended(self, salt: bytes, tokens: NDArray[np.int32]) -> None:
        """Keep the text of a finished sequence for others with its salt."""
        if self.suffixes and self.shares:
            self.shared.add(salt, tokens)

    def choose(self, proposals: Sequence[Proposal], rows: int, most: int) -> list[int]:
        """Return how many drafts of each proposal to verify in a step of `rows` rows, at most `most` in all."""
        worth = [(each, number) for number, proposal in enumerate(proposals) for each in proposal.worth]
        # Within a proposal worth falls, so a sorted prefix takes the first drafts of each.
        worth.sort(key=lambda each: -each[0])
        gained = list(accumulate(gain for gain, _ in worth[:most]))
        best, best_value = 0, float(rows)
        for count in _counts_to_weigh(len(gained)):
            value = (rows + gained[count - 1]) / self.costs.ratio(rows, count)
            if value > best_value:
                best, best_value = count, value
        lengths = [0] * len(proposals)
        for _, number in worth[:best]:
            lengths[number] += 1
        return lengths

    def verified(self, drafts: SequenceDrafts, proposal: Proposal, accepted: int) -> None:
        drafts.verified(proposal, accepted)
        for place in range(1, len(proposal.tokens) + 1):
            self.counts.proposed[proposal.drafter, place] += 1
            self.counts.accepted[proposal.drafter, place] += place <= accepted


def _counts_to_weigh(most: int) -> list[int]:
    """Return numbers of drafts from 1 to `most`: all small ones, and not more than a hundred.

    >>> _counts_to_weigh(3), _counts_to_weigh(1000)[-3:], len(_counts_to_weigh(1792))
    ([1, 2, 3], [976, 992, 1000], 78)
    """
    step = 1 + most // 64
    return [*range(1, min(most, 16) + 1), *range(16 // step * step + step, most, step), *([most] if most > 16 else [])]
