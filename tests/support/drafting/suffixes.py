"""Guesses from earlier text, held against a search of all places."""

from __future__ import annotations

from random import Random

import numpy as np

from weft.drafting.policy import suffix
from weft.drafting.policy.choosing import Drafting
from weft.drafting.policy.suffix import (
    KEY,
    Match,
    OwnText,
)


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def find(own: OwnText, answer: list[int], most: int) -> Match | None:
    run = own.extend(answer)
    return None if run is None else own.match(run, most)


def longest_by_search(text: list[int]) -> int:
    """The longest agreement of the end of a text with an earlier place, by trying all."""
    found = [0]
    for end in range(KEY, len(text)):
        length = 0
        while length < min(end, suffix.LONGEST_COMPARED) and text[end - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        found.append(length)
    return max(found)


def check_random_texts_match_wherever_a_search_of_all_places_does() -> None:
    random = Random(1)
    matched = 0
    for _ in range(200):
        text = [random.randrange(3) for _ in range(random.randint(1, 40))]
        cut = random.randint(0, len(text))
        own = OwnText(ints(text[:cut]))
        for end in range(cut, len(text) + 1):
            match, best = find(own, text[cut:end], 4), longest_by_search(text[:end])
            assert (match is not None) == (best >= KEY)
            if match is not None:
                matched += 1
                assert KEY <= match.length <= best
                assert len(match.tokens) == 4
    assert matched > 500


def check_what_has_a_guess_is_asked_for_it() -> None:
    """Of small vocabularies, whose runs come again in the prompt, in the answer and in other texts, but not always."""
    random = Random(3)
    asked = {True: 0, False: 0}
    for _ in range(100):
        words, drafting = random.choice((4, 6, 12)), Drafting(4)
        texts = [[random.randrange(words) for _ in range(random.randint(1, 40))] for _ in range(4)]
        for number, text in enumerate(texts[1:]):
            drafting.ended(b"%d" % (number % 2), ints(text))
        quick, thorough = (drafting.begin(ints(texts[0]), b"1", None, None) for _ in range(2))
        answer: list[int] = []
        for _ in range(40):
            answer += random.choice(texts)[:7] if random.random() < 0.05 else [random.randrange(words)]
            may_draft = quick.may_draft(answer, drafting.shared)
            assert may_draft or thorough.find_drafts(answer, 4, drafting.shared) is None
            asked[may_draft] += 1
    assert min(asked.values()) > 500


def check_texts_of_another_salt_are_never_drafted() -> None:
    drafting = Drafting(4)
    drafting.ended(b"one", ints(list(range(1, 11))))
    for salt, expected in ((b"one", (7, 8, 9, 10)), (b"other", None), (b"", None)):
        drafts = drafting.begin(ints([99, *range(1, 7)]), salt, None, None)
        proposal = drafts.find_drafts([], 4, drafting.shared)
        assert (proposal and proposal.tokens) == expected


class LinearCosts:
    """A step takes as long as `1 + each * drafts`."""

    def __init__(self, each: float) -> None:
        self.each = each

    def observe(self, tokens: int, drafts: int, seconds: float) -> None:
        raise AssertionError("only a landed step is observed")

    def known(self, rows: int) -> bool:
        return True

    def measured(self, rows: int, drafts: int) -> bool:
        return True

    def ratio(self, rows: int, drafts: int) -> float:
        return 1 + self.each * drafts
