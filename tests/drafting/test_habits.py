"""Drafts where a grammar leaves a choice: by what followed before, in this answer and in earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from tests.support.drafting.habits import (
    GRAMMAR,
    AnyToken,
    check_habits_of_another_salt_or_grammar_are_never_guesses,
    guesses,
    taught,
)
from weft.base.grammar import Grammar
from weft.drafting.policy.choosing import Drafting
from weft.drafting.policy.habits import MOST_NOTED, MOST_OF_ONE, Habits, SharedHabits, key_of
from weft.drafting.policy.spelling import SOURCES, Draft, spelled

# The sources of habits in the order in which they are asked: whose, and how many tokens agree.
ORDER = (("own pair", 2), ("other pair", 2), ("own token", 1), ("other token", 1))


def follows(answers: list[list[int]], last: list[int]) -> list[int]:
    """Return all that followed these tokens in the answers, the latest first."""
    size = len(last)
    found = [a[i] for a in answers for i in range(size, len(a)) if a[i - size : i] == last]
    return found[::-1]


def expected(own: list[int], others: list[list[int]], allows: Callable[[int], bool]) -> Draft | None:
    """Return what followed the last two tokens, or the last one: one of the two latest, if it is allowed."""
    for source, size in ORDER:
        last = own[-size:]
        found = follows([own] if source.startswith("own") else others, last)[:2] if len(last) == size else []
        right = next((token for token in found if allows(token)), None)
        if right is not None:
            same = len(found) == 2 and found[0] == found[1]
            return Draft(right, f"{source} again" if same else source)
    return None


@pytest.mark.parametrize("seed", range(20))
def test_a_habit_is_what_followed_the_last_tokens_before(seed: int) -> None:
    random = Random(seed)
    key = key_of(b"salt", GRAMMAR)
    shared, others = SharedHabits(), list[list[int]]()
    for _ in range(4):
        own, answer = Habits(), [random.randrange(5)]
        while len(answer) < 40:
            allowed = {random.randrange(5) for _ in range(3)}
            if random.random() < 0.7:
                own.extend(answer)
                guess = own.draft(shared.of(key), answer[-2:], allowed.__contains__)
                assert guess == expected(answer, others, allowed.__contains__)
                assert guess is None or guess.source in SOURCES
            answer.append(random.randrange(5) if random.random() < 0.3 else answer[-3:][0] ^ 1)
        own.extend(answer)
        shared.add(key, own)
        others.append(answer)


def test_habits_of_another_salt_or_grammar_are_never_guesses() -> None:
    check_habits_of_another_salt_or_grammar_are_never_guesses()


def test_habits_are_dropped_with_the_cache_and_not_kept_without_one() -> None:
    drafting = taught(b"one", GRAMMAR)
    drafting.flush()
    assert guesses(drafting, b"one", GRAMMAR) == ()
    assert guesses(taught(b"one", GRAMMAR, shares=False), b"one", GRAMMAR) == ()


def test_habits_are_bounded_and_the_oldest_go_first() -> None:
    shared = SharedHabits(most=24, most_of_one=10)
    keys = [bytes([number]) for number in range(5)]
    for key in keys:
        for part in range(3):
            own = Habits()
            own.extend([100 * part + token for token in range(8)])
            shared.add(key, own)
            assert shared.entries <= 24
            assert len(shared.of(key) or ()) <= 10
    assert [key for key in keys if shared.of(key)] == keys[3:]
    kept = shared.of(keys[4]) or {}
    assert 206 in kept, "the last answer's"
    assert 6 not in kept, "the first one's"
    shared.clear()
    assert shared.entries == 0
    assert shared.of(keys[4]) is None


@pytest.mark.parametrize("length", range(4))
def test_short_answers_to_many_grammars_are_bounded_too(length: int) -> None:
    shared = SharedHabits(most=24)
    for number in range(200):
        own = Habits()
        own.extend(list(range(length)))
        shared.add(key_of(b"salt", Grammar("regex", f"a{{{number}}}")), own)
    kept = sum(shared.of(key_of(b"salt", Grammar("regex", f"a{{{number}}}"))) is not None for number in range(200))
    # Of one token nothing follows; of two, one entry and the key.
    assert kept == (0, 0, 12, 6)[length]
    assert shared.entries <= 24


def test_keys_tell_salts_and_grammars_apart() -> None:
    grammars = [
        Grammar("regex", "b"),
        Grammar("choice", "b"),
        Grammar("regex", "b", "c"),
        Grammar("regex", "b", "None"),
    ]
    keys = {key_of(salt, grammar) for salt in (b"", b"a", b"ab", b"regex") for grammar in grammars}
    assert len(keys) == 16
    assert {len(key) for key in keys} == {16}


def test_every_token_of_an_answer_is_noted_once() -> None:
    noted = []

    class Counting(Habits):
        def _note(self, key: int, token: int) -> None:
            noted.append(key)
            super()._note(key, token)

    habits, answer = Counting(), []
    for token in range(50):
        answer.append(token % 7)
        habits.extend(answer)
        habits.extend(answer)
    assert len(noted) == 2 * 50 - 3
    assert len(habits.followers) <= 2 * 7


def test_an_answer_that_was_never_asked_for_guesses_is_noted_from_near_its_end() -> None:
    habits = Habits()
    habits.extend([1, 2, *range(10, 10 + 2 * MOST_NOTED), 7, 8])
    assert len(habits.followers) == 2 * MOST_NOTED
    assert 1 not in habits.followers
    assert habits.followers[7] == (8, None)


def test_a_long_answer_has_no_more_habits_and_keeps_those_of_its_beginning() -> None:
    habits = Habits()
    answer: list[int] = []
    for token in [1, 2, *range(10, 10 + MOST_OF_ONE), 1, 3]:
        answer.append(token)
        habits.extend(answer)
    assert len(habits.followers) == MOST_OF_ONE
    assert habits.followers[1] == (3, 2)


def test_each_source_of_drafts_has_its_own_acceptance() -> None:
    """Where own pairs are right and single tokens wrong, the former are worth much and the latter little."""
    drafting = Drafting(4)
    right = AnyToken(1, 2, 3, 4), [1, 2, 3, 1, 2, 3, 1, 2], "own pair again", 1
    wrong = AnyToken(4), [1, 2, 4, 3, 2, 1, 3, 2], "own token", 0
    for ahead, answer, source, accepted in [right, wrong] * 60:
        drafts = drafting.begin(np.array([8], np.int32), b"", None, None, GRAMMAR)
        assert drafts is not None
        proposal = drafts.spell(ahead, answer, 1, 1, drafting.shared, drafting.habits)
        assert proposal is not None
        assert proposal.sources == (source,)
        drafting.learn(drafts, proposal, accepted)
    assert drafting.overall["own pair again"].rate(0) > 0.95
    assert drafting.overall["own token"].rate(0) < 0.1
    assert drafting.counts.accepted["habit", 1] == 60
    assert drafting.counts.proposed["habit", 1] == 120


def test_drafts_end_where_they_are_unlikely() -> None:
    found = spelled(AnyToken(1), 15, lambda before: Draft(1, "own token"), {"own token": 0.5}.__getitem__)
    assert found.worth == (0.5, 0.25, 0.125, 0.0625)


@pytest.mark.parametrize("guesses", range(4))
def test_guesses_by_habit_are_bounded_and_forced_tokens_are_not(guesses: int) -> None:
    class EverySecond(AnyToken):
        """Forces every second token."""

        taken = 0

        def forced(self) -> int | None:
            return 7 if self.taken % 2 else None

        def take(self, token: int) -> bool:
            self.taken += 1
            return True

    drafting = Drafting(15)
    drafts = drafting.begin(np.array([8], np.int32), b"", None, None, GRAMMAR)
    assert drafts is not None
    found = drafts.spell(EverySecond(1), [1, 7, 1, 7], 6, guesses, drafting.shared, drafting.habits)
    assert (found.tokens if found else ()) == (1, 7) * guesses
