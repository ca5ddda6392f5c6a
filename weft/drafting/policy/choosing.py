"""Which rows draft in a step, and how far: drafts from all drafters, weighed by their measured acceptance.

The expected number of tokens per unit of time decides. A draft after others is accepted only if all of them are, so
each next one is worth less; drafts of all rows are added in the order of their worth while the step's cost, by its
size, grows less than the tokens expected of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from weft.base.constraint import LookAhead
from weft.base.grammar import Grammar
from weft.drafting.policy.acceptance import LEAST_RATE, MEMORY_OF_ALL, Acceptance
from weft.drafting.policy.costs import LearnedCosts, StepCosts
from weft.drafting.policy.counts import DraftCounts
from weft.drafting.policy.habits import Habits, SharedHabits, key_of
from weft.drafting.policy.spelling import DRAFTER_OF, SOURCE_OF, SOURCES, Draft, spelled
from weft.drafting.policy.suffix import LONGEST_COMPARED, Match, OwnText, Prediction, SharedTexts
from weft.drafting.policy.suffix import key_of as run_key

# Acceptance of a draft that is assumed before any was verified, by drafter and length of the match.
PRIORS = {"prediction": 0.8, "suffix": 0.4, "long suffix": 0.8, "model": 0.6, "mtp": 0.6}
LONG_MATCH = 8
# Tokens that must agree with another text of the salt. Phrases of three tokens are common to all prose, and what
# follows them is not: of 42 such drafts in stories of `weft-small`, two were right.
LEAST_SHARED = 6
# Steps in which a row drafts nothing after drafts that were refused at once or did not pay: doubled each time, up to
# a bound.
FIRST_PAUSE, LONGEST_PAUSE = 1, 64
# A step with drafts must promise this many times the tokens per unit of time of one without: at first, and after a step
# with drafts on a device that pads. While drafts are verified, bad luck passes; without them it would stay.
LEAST_GAIN, LEAST_KEPT_GAIN = 1.02, 0.98
# Kinds of drafts that are tried, a few at first, and after how many right rows they are tried in full.
TRIED = ("suffix", "long suffix")
LONGEST_STREAK = 4
# Tokens of a step, without padding, up to which sizes are tried in any order: what takes time is to read the weights.
CHEAP_TRIAL = 256
# Share of the time that may be lost by trying more drafts than pay as far as is known.
TRIALS = 0.0025
# Drafters that are judged without verification too: rows do not ask them while that shows that they are of no use.
JUDGED_ALONE = ("mtp",)
# Steps between two probes, which are drafts that do not pay as far as is known: doubled each time, up to a bound.
FIRST_PROBE, RAREST_PROBE = 64, 256


@dataclass(frozen=True, slots=True)
class RowDrafts:
    """Drafts for one row. `worth` is the probability that each of them and all before it are accepted.

    A draft model decodes only for rows that are chosen: until then its drafts have a worth and no `tokens`. With
    drafts in flight, `earlier` are those before the row's own, which it has instead where those in flight are refused.
    `landing` returns tokens that only the device has so far: until they are needed, `tokens` are zeros. `sources` say
    what each draft comes from, in a grammar; elsewhere all are of the same `kind`.
    """

    drafter: str
    kind: str
    tokens: tuple[int, ...]
    worth: tuple[float, ...]
    earlier: tuple[int, ...] = ()
    landing: Callable[[], tuple[int, ...]] | None = None
    sources: tuple[str, ...] = ()

    @property
    def drafters(self) -> list[str]:
        """Return the drafter of each token."""
        if self.sources:
            return [DRAFTER_OF.get(source, "habit") for source in self.sources]
        return [self.drafter] * len(self.tokens)

    @property
    def begins_with_habit(self) -> bool:
        return bool(self.sources) and self.sources[0] not in DRAFTER_OF

    def first(self, count: int) -> RowDrafts:
        """Return the first of the drafts."""
        if count == len(self.worth):
            return self
        return replace(self, tokens=self.tokens[:count], worth=self.worth[:count], sources=self.sources[:count])

    def with_tokens(self, tokens: Sequence[int]) -> RowDrafts:
        """Return the drafts with their tokens, which may be fewer than were asked for."""
        return replace(self, tokens=tuple(tokens), worth=self.worth[: len(tokens)])

    def on_device(self, count: int, landing: Callable[[], tuple[int, ...]]) -> RowDrafts:
        """Return the drafts with this number of tokens, which only the device knows until their landing."""
        return replace(self.with_tokens((0,) * count), landing=landing)

    def landed(self) -> RowDrafts:
        """Return the drafts with the tokens that the device had."""
        return self if self.landing is None else replace(self, tokens=self.landing(), landing=None)

    def later(self, drafts: int = 0) -> RowDrafts:
        """Return the drafts after those of tokens in flight: of this number of drafts, and of the sample after them.

        If drafts are refused, the row starts earlier in the same text, as if something was replaced, not inserted.
        """
        skipped = drafts + 1
        earlier, sources = self.tokens[1:skipped], self.sources[skipped:]
        return replace(self, tokens=self.tokens[skipped:], worth=self.worth[skipped:], earlier=earlier, sources=sources)

    def moved(self, refused: int) -> RowDrafts:
        """Return the drafts of a row that starts earlier by as many tokens as were refused."""
        if self.landing is not None:
            # The device drafted from where the row starts.
            return self
        drafts, first = self.earlier + self.tokens, len(self.earlier) - refused
        return replace(self, tokens=drafts[first : first + len(self.tokens)], earlier=())


class SequenceDrafts:
    """The drafting of one sequence: its texts, and how well its drafts did. `most` bounds the drafts of a step."""

    def __init__(
        self,
        prompt: NDArray[np.int32],
        salt: bytes,
        most: int,
        prediction: NDArray[np.int32] | None = None,
        suffixes: bool = True,
        overall: dict[str, Acceptance] | None = None,
        model: str | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        self.most = most
        self.salt = salt
        self._prompt_length = len(prompt)
        # What followed what in an answer that follows a grammar. Where a model decodes, it drafts instead.
        self._has_grammar = grammar is not None
        self._form = key_of(salt, grammar) if suffixes and grammar is not None else b""
        self._habits = Habits() if self._form and model is None else None
        # The drafter that decodes where texts have no long match, None for ever once it has lost this sequence. Of its
        # first drafts, how many are known to be right or wrong, and how many were right.
        self.model = model
        self._judged = self._right = 0
        self._own = OwnText(prompt) if suffixes else None
        self._prediction = Prediction(prediction) if prediction is not None and len(prediction) else None
        # By kind: of all sequences of the engine, and of this one.
        self._overall = {} if overall is None else overall
        self._acceptance: dict[str, Acceptance] = {}
        self._pause = FIRST_PAUSE
        # By kind: rows of which all drafts were right, since the last one with a wrong draft.
        self._streaks: dict[str, int] = {}

    def leave_model(self) -> None:
        """Draft without the drafter that decodes: it cannot follow this sequence."""
        self.model, self._habits = None, Habits() if self._form else None

    @property
    def only_searches(self) -> bool:
        """Return whether all drafts come from texts, so that to ask for some means to search."""
        return self.model is None and self._prediction is None and not self._has_grammar

    @property
    def is_hopeless(self) -> bool:
        """Return whether the drafter that decodes is hardly ever right, in this sequence and all others."""
        if self.model not in JUDGED_ALONE or self._right > LEAST_RATE * self._judged:
            return False
        overall = self._overall.get(self.model)
        return overall is not None and overall.rate(0) < LEAST_RATE

    def may_draft(self, answer: list[int], shared: SharedTexts) -> bool:
        """Return whether it is worth the time to ask for drafts: in free text, most often nothing recurs."""
        own = self._own
        if own is None or self._prediction is not None or self._has_grammar:
            return True
        if self.model is not None and not self.is_hopeless:
            return True
        run = own.extend(answer)
        if run is None:
            return False
        if own.recurs(run):
            return True
        place = shared.place(self.salt, run_key(*run))
        return place is not None and shared.agrees(place, own.last(LEAST_SHARED))

    def find_drafts(self, answer: list[int], most: int, shared: SharedTexts, in_flight: int = 0) -> RowDrafts | None:
        """Return up to `most` drafts to follow the answer, or None if there are none.

        With tokens in flight, the first `in_flight` drafts are of these.
        """
        most = min(most, self.most)
        if most < 1:
            return None
        most += in_flight
        if self._prediction is not None and (match := self._prediction.match(answer, most)) is not None:
            return self._drafts_of("prediction", "prediction", match)
        match = self._match(answer, most, shared)
        is_long = match is not None and match.length >= LONG_MATCH
        if self.model is not None and not is_long and not self.is_hopeless:
            return RowDrafts(self.model, self.model, (), self._acceptance_of(self.model).worth(most))
        if match is None or not match.tokens:
            return None
        return self._drafts_of("suffix", "long suffix" if is_long else "suffix", match)

    def spell(
        self, ahead: LookAhead, answer: list[int], most: int, by_habit: int, shared: SharedTexts, habits: SharedHabits
    ) -> RowDrafts | None:
        """Return drafts of a row that follows a grammar, or None: what it forces, and drafts of choices.

        Up to `by_habit` choices are made by habit. Where a model decodes, its drafts are returned if nothing is forced.
        """
        most = min(most, self.most)
        text: RowDrafts | None = None
        asked = False

        def draft(before: list[int]) -> Draft | None:
            nonlocal text, asked, by_habit
            if not asked:
                asked, text = True, self.find_drafts(answer, most, shared)
            found = _continued(text, before, ahead)
            if by_habit < 1 or self._habits is None or not answer:
                return found
            habit = self._habit(ahead, answer, before, habits)
            if habit is not None and (found is None or self._rate(habit.source) > self._rate(found.source)):
                by_habit -= 1
                return habit
            return found

        tokens, sources, worth = spelled(ahead, most, draft, self._rate)
        if tokens:
            return RowDrafts("grammar", "grammar", tokens, worth, sources=sources)
        return text if text is not None and not text.tokens else None

    def _habit(self, ahead: LookAhead, answer: list[int], before: list[int], habits: SharedHabits) -> Draft | None:
        """Return what followed the last tokens of the answer, and of the drafts `before`, when they came before."""
        assert self._habits is not None
        self._habits.extend(answer)
        place = len(before)
        recent = before[-2:] if place > 1 else [*answer[place - 2 :], *before]
        return self._habits.draft(habits.of(self._form), recent, ahead.allows)

    def _rate(self, source: str) -> float:
        return self._acceptance_of(source).rate(0)

    def share_habits(self, tokens: NDArray[np.int32], habits: SharedHabits) -> None:
        """Keep the habits of a finished sequence, whose text is given, for others of its salt and grammar."""
        if self._habits is not None:
            self._habits.extend(tokens[self._prompt_length :].tolist())
            habits.add(self._form, self._habits)

    def _match(self, answer: list[int], most: int, shared: SharedTexts) -> Match | None:
        """Return the longer of the matches in the sequence's own text and in those of its salt; its own if equal."""
        if self._own is None:
            return None
        run = self._own.extend(answer)
        if run is None:
            return None
        own, place = self._own.match(run, most), shared.place(self.salt, run_key(*run))
        if place is None or (own is not None and own.length >= LONGEST_COMPARED):
            return own
        other = shared.match(place, self._own.last(LONGEST_COMPARED), most)
        if other is None or other.length < LEAST_SHARED or (own is not None and own.length >= other.length):
            return own
        return other

    def _drafts_of(self, drafter: str, kind: str, match: Match) -> RowDrafts:
        return RowDrafts(drafter, kind, match.tokens, self._acceptance_of(kind).worth(len(match.tokens)))

    def _acceptance_of(self, kind: str) -> Acceptance:
        if kind not in self._acceptance:
            prior = SOURCES.get(kind, PRIORS.get(kind, 0.5))
            overall = self._overall.setdefault(kind, Acceptance(prior, memory=MEMORY_OF_ALL))
            self._acceptance[kind] = Acceptance(prior, overall)
        return self._acceptance[kind]

    def bound(self, row_drafts: RowDrafts) -> RowDrafts:
        """Return as many drafts as are worth a trial: few at first, twice as many each time that all were right."""
        if row_drafts.kind not in TRIED:
            return row_drafts
        expected = sum(self._acceptance_of(row_drafts.kind).worth(len(row_drafts.worth)))
        most = max(1, int(expected)) << self._streaks.get(row_drafts.kind, 0)
        return row_drafts.first(min(most, len(row_drafts.worth)))

    def outlook(self, row_drafts: RowDrafts) -> tuple[float, float]:
        """Return how many drafts of a row are expected to be right if rows wait for what follows these, and if not.

        If not, a row's drafts are right only if all these are, and one more. After a row whose drafts were wrong, the
        next one needs a single right draft: the only token of that row.
        """
        if row_drafts.sources:
            # What a grammar allows depends on every token: no row follows drafts in flight.
            return sum(row_drafts.worth), 0.0
        count = len(row_drafts.tokens)
        worth = self._acceptance_of(row_drafts.kind).worth(count + 1)
        right, continued = sum(worth[:count]), worth[count]
        # In the long run, this share of the rows has drafts that continue the answer.
        share = worth[0] / (worth[0] + 1 - continued) if worth[0] else 0.0
        return right, share * right

    def verified(self, row_drafts: RowDrafts, accepted: int) -> int:
        """Return for how many steps to draft nothing after a row of which this many drafts were accepted."""
        all_right = accepted == len(row_drafts.tokens)
        self._streaks[row_drafts.kind] = (
            min(self._streaks.get(row_drafts.kind, 0) + 1, LONGEST_STREAK) if all_right else 0
        )
        if accepted:
            self._pause = FIRST_PAUSE
        # A draft from a text that the answer has left says little about the next one. All others are as good as their
        # measured acceptance, by which they are chosen again or not.
        return 0 if accepted or row_drafts.kind not in TRIED else self.pause()

    def learn(self, row_drafts: RowDrafts, accepted: int) -> None:
        """Learn from a verified row, for this sequence and for all."""
        # Each source of drafts in a grammar has one acceptance, wherever it is in the row.
        for place, source in enumerate(row_drafts.sources[: accepted + 1]):
            self._acceptance_of(source).note(1, int(place < accepted))
            self._overall[source].note(1, int(place < accepted))
        if not row_drafts.sources:
            self._acceptance_of(row_drafts.kind).note(len(row_drafts.tokens), accepted)
            self._overall[row_drafts.kind].note(len(row_drafts.tokens), accepted)
        if row_drafts.kind == self.model:
            self._judged += 1
            self._right += accepted > 0

    def pause(self) -> int:
        """Return for how many steps to draft nothing, because drafts were refused at once or did not pay."""
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return pause


class Drafting:
    """Decides the drafts of each step, for all rows together. `most` bounds the drafts of a row.

    `shares`: finished texts are kept as drafts for later requests with the same salt. `model` names the drafter that
    decodes, if there is one.
    """

    def __init__(
        self,
        most: int,
        suffixes: bool = True,
        costs: StepCosts | None = None,
        shares: bool = True,
        model: str | None = None,
    ) -> None:
        self.most = most
        self.model = model
        self.suffixes = suffixes
        self.shares = shares
        self.costs: StepCosts = LearnedCosts() if costs is None else costs
        self.shared = SharedTexts()
        self.habits = SharedHabits()
        self.counts = DraftCounts()
        self.overall: dict[str, Acceptance] = {}
        # By the rows of a step: the numbers of drafts that fill a size that the device pads steps to, the largest last.
        # All steps of a size cost the same. None: there are no such sizes.
        self.counts_that_fit: Callable[[int], Sequence[int] | None] = lambda rows: None
        self._probe_after = self._probe_every = FIRST_PROBE
        # Whether the last choice had drafts.
        self._drafts = False
        # Steps that trials of more drafts may lose.
        self._trials = 0.0

    def begin(
        self,
        prompt: NDArray[np.int32],
        salt: bytes,
        most: int | None,
        prediction: NDArray[np.int32] | None,
        grammar: Grammar | None = None,
    ) -> SequenceDrafts | None:
        """Return the drafting of a new sequence; None if it has none. `most` is the request's own bound."""
        bound = self.most if most is None else min(most, self.most)
        if bound < 1 or not (self.suffixes or self.model or prediction is not None):
            return None
        return SequenceDrafts(prompt, salt, bound, prediction, self.suffixes, self.overall, self.model, grammar)

    def ended(
        self, salt: bytes, tokens: NDArray[np.int32], drafts: SequenceDrafts | None = None, reused: int = 0
    ) -> None:
        """Keep the text of a finished sequence, and its habits, for others with its salt.

        The first `reused` tokens came with the text of the sequence that computed them.
        """
        if self.suffixes and self.shares:
            self.shared.add(salt, tokens[max(0, reused - LONGEST_COMPARED) :])
            if drafts is not None:
                drafts.share_habits(tokens, self.habits)

    def flush(self) -> None:
        """Drop all that is kept of finished sequences."""
        self.shared.clear()
        self.habits.clear()

    def choose(self, all_drafts: Sequence[RowDrafts], rows: int, most: int) -> list[int]:
        """Return how many drafts of each row to verify in a step of `rows` rows, at most `most` in all.

        A step of these rows fits a size of the device, if that has any.
        """
        worth = sorted((each for row_drafts in all_drafts for each in row_drafts.worth), reverse=True)
        sizes = self.counts_that_fit(rows)
        if sizes is not None:
            most = min(most, max(sizes, default=0))
        gained = list(accumulate(worth[:most]))
        best, best_value = 0, rows * (LEAST_KEPT_GAIN if self._drafts and sizes is not None else LEAST_GAIN)
        more, more_value, more_ratio = 0, 0.0, 0.0
        for count in _counts_to_weigh(len(gained), sizes):
            ratio = self.costs.ratio(rows, count)
            value = (rows + gained[count - 1]) / ratio
            if value > best_value:
                best, best_value, more_value = count, value, 0.0
                if sizes is not None and rows + count > CHEAP_TRIAL and not self.costs.measured(rows, count):
                    # Larger sizes take no less time. They are tried once this one is known.
                    break
            elif value > more_value:
                more, more_value, more_ratio = count, value, ratio
        self._drafts = best > 0
        if not best:
            return [0] * len(all_drafts)
        self._probe_every = FIRST_PROBE
        if more_value and self._tries(more_ratio * (1 - more_value / best_value)):
            best = more
        return _lengths(all_drafts, best, worth[best - 1])

    def _tries(self, lost: float) -> bool:
        """Return whether a step tries more drafts than pay as far as is known, and loses this part of a step.

        Only a verified draft shows its acceptance: without trials, what had bad luck would never be chosen again. What
        nearly pays is tried often.
        """
        self._trials += TRIALS
        if lost > self._trials:
            return False
        self._trials = 0.0
        return True

    def possible(self, rows: int) -> bool:
        """Return whether a step of these rows may have drafts. Without a size for it, the device would be slower."""
        sizes = self.counts_that_fit(rows)
        return sizes is None or len(sizes) > 0

    def plans_ahead(self, known: float, unknown: float, lost: float) -> bool:
        """Return whether to plan the next step while drafts are in flight.

        `known` tokens are expected of a step that is planned after their landing, and `unknown` of one planned before
        it; the former loses this share of a step.
        """
        return unknown * (1 + lost) > known

    def probes(self, step: int, possible: bool) -> bool:
        """Return whether the step of this number verifies drafts although none of them pays.

        What was refused long ago may be right now, and only a verified draft shows it. So a few rows try, rarely.
        """
        if step < self._probe_after or not possible:
            return False
        self._probe_after = step + self._probe_every
        self._probe_every = min(2 * self._probe_every, RAREST_PROBE)
        return True

    def learn(self, drafts: SequenceDrafts, row_drafts: RowDrafts, accepted: int) -> None:
        """Count the drafts of a verified row, and learn from them."""
        for place, drafter in enumerate(row_drafts.drafters, 1):
            self.counts.proposed[drafter, place] += 1
            self.counts.accepted[drafter, place] += place <= accepted
        drafts.learn(row_drafts, accepted)


def _continued(text: RowDrafts | None, before: list[int], ahead: LookAhead) -> Draft | None:
    """Return the next token of a text that the drafts `before` have followed so far, if it is allowed."""
    place = len(before)
    if text is None or place >= len(text.tokens) or text.tokens[:place] != tuple(before):
        return None
    token = text.tokens[place]
    return Draft(token, SOURCE_OF.get(text.kind, text.kind)) if ahead.allows(token) else None


def _lengths(all_drafts: Sequence[RowDrafts], count: int, least: float) -> list[int]:
    """Return how many drafts each row has among the best `count` of all, which are worth at least this much.

    >>> _lengths([RowDrafts("a", "a", (1, 2), (0.9, 0.5)), RowDrafts("a", "a", (1, 2), (0.6, 0.5))], 3, 0.5)
    [2, 1]
    """
    # Within a row worth falls, so the best ones are its first.
    lengths = [sum(worth > least for worth in row_drafts.worth) for row_drafts in all_drafts]
    left = count - sum(lengths)
    for number, row_drafts in enumerate(all_drafts):
        equal = min(left, row_drafts.worth.count(least))
        lengths[number] += equal
        left -= equal
    return lengths


def _counts_to_weigh(most: int, sizes: Sequence[int] | None = None) -> list[int]:
    """Return numbers of drafts from 1 to `most`: those that fill a size, or else all small ones, and at most a hundred.

    >>> _counts_to_weigh(3), _counts_to_weigh(1000)[-3:], len(_counts_to_weigh(1792))
    ([1, 2, 3], [976, 992, 1000], 78)
    >>> _counts_to_weigh(600, (256, 512, 768)), _counts_to_weigh(0, (256, 512, 768))
    ([256, 512, 600], [])
    """
    if sizes is not None:
        return [*(count for count in sizes if count < most), *([most] if most else [])]
    step = 1 + most // 64
    return [*range(1, min(most, 16) + 1), *range(16 // step * step + step, most, step), *([most] if most > 16 else [])]
