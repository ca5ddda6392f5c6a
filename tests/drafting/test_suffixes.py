"""Drafts from earlier text: what they are, what they cost, and whose text they may come from."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.support.drafting.suffixes import (
    LinearCosts,
    check_random_texts_match_wherever_a_search_of_all_places_does,
    check_texts_of_another_salt_are_never_drafted,
    check_what_has_a_guess_is_asked_for_it,
    find,
    ints,
)
from weft.base.grammar import Grammar
from weft.drafting.policy import suffix
from weft.drafting.policy.choosing import LEAST_SHARED, Drafting, RowDrafts, SequenceDrafts
from weft.drafting.policy.costs import FORGET_AFTER, KEPT, MEASURED_OF, NEEDED, LearnedCosts
from weft.drafting.policy.suffix import (
    KEY,
    LONGEST_COMPARED,
    MOST_OF_ONE,
    Match,
    OwnText,
    Prediction,
    SharedTexts,
    ends_of,
    key_of,
)


def test_the_continuation_of_the_longest_match_is_drafted() -> None:
    own = OwnText(ints([9, 1, 2, 3, 4, 5, 8, 1, 2, 3, 6, 7]))
    assert find(own, [9, 1, 2, 3], 2) == Match(4, (4, 5))


def test_a_loop_is_continued_beyond_its_end() -> None:
    own = OwnText(ints([1, 2, 3, 1, 2, 3, 1, 2, 3]))
    assert find(own, [], 7).tokens == (1, 2, 3, 1, 2, 3, 1)


def test_random_texts_match_wherever_a_search_of_all_places_does() -> None:
    check_random_texts_match_wherever_a_search_of_all_places_does()


def test_a_text_that_is_asked_now_and_then_has_the_matches_of_one_that_is_asked_after_every_token() -> None:
    random = Random(2)
    matched = 0
    for _ in range(200):
        prompt = [random.randrange(4) for _ in range(random.randint(0, 12))]
        answer: list[int] = []
        eager, lazy = OwnText(ints(prompt)), OwnText(ints(prompt))
        for _ in range(60):
            answer.append(random.randrange(4))
            expected = find(eager, answer, 5)
            if random.random() < 0.2:
                match = find(lazy, answer, 5)
                assert match == expected
                matched += match is not None
    assert matched > 500


def test_what_has_a_guess_is_asked_for_it() -> None:
    """Of small vocabularies, whose runs come again in the prompt, in the answer and in other texts, but not always."""
    check_what_has_a_guess_is_asked_for_it()


def test_other_guesses_than_those_from_texts_are_always_asked_for() -> None:
    shared, grammar = SharedTexts(), Grammar("regex", "a+")
    for others in ({"prediction": ints([1, 2])}, {"model": "mtp"}, {"grammar": grammar}, {"suffixes": False}):
        assert SequenceDrafts(ints([5, 6, 7, 8]), b"", 4, **others).may_draft([9], shared)
    drafts = SequenceDrafts(ints([5, 6, 7, 8]), b"", 4, model="mtp")
    drafts.leave_model()
    assert not drafts.may_draft([9], shared)
    assert drafts.may_draft([9, 5, 6, 7], shared)


@pytest.mark.parametrize("length", [2, 3, 4, 9, 40, 41, 42, 43, 200, 1000])
def test_a_text_is_searched_from_its_end_to_a_bound(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(suffix, "SEARCHED_FIRST", 8)
    monkeypatch.setattr(suffix, "MOST_SEARCHED", 300)
    monkeypatch.setattr(suffix, "FEW", 5)
    random = Random(length)
    for _ in range(50):
        text = [random.randrange(6) for _ in range(length)]
        run = tuple(random.randrange(6) for _ in range(KEY))
        ends = [end for end in range(length, KEY - 1, -1) if tuple(text[end - KEY : end]) == run]
        expected = [end for end in ends if end - KEY >= length - 300][: suffix.MOST_COMPARED]
        assert ends_of(ints(text), run) == expected


def test_a_prediction_is_followed_from_its_start_and_found_again_after_a_change() -> None:
    guess = Prediction(ints([1, 2, 3, 4, 5, 6, 7, 8]))
    assert guess.match([], 3).tokens == (1, 2, 3)
    assert guess.match([1, 2], 3).tokens == (3, 4, 5)
    assert guess.match([1, 2, 99], 3) is None
    assert guess.match([1, 2, 99, 4, 5], 3) is None
    assert guess.match([1, 2, 99, 4, 5, 6], 3).tokens == (7, 8)
    assert guess.match([1, 2, 99, 4, 5, 6, 7, 8], 3) is None


def test_texts_of_another_salt_are_never_drafted() -> None:
    check_texts_of_another_salt_are_never_drafted()


def test_short_phrases_of_other_texts_are_not_drafted() -> None:
    drafting = Drafting(4)
    drafting.ended(b"", ints(list(range(1, 11))))
    for length in range(1, 8):
        drafts = drafting.begin(ints([99, 98, 97, *range(1, 1 + length)]), b"", None, None)
        assert (drafts.find_drafts([], 4, drafting.shared) is not None) == (length >= LEAST_SHARED)


def test_shared_texts_are_bounded_and_the_oldest_go_first() -> None:
    shared = SharedTexts(most=100)
    for number in range(50):
        shared.add(b"%d" % (number % 3), ints(list(range(number * 20, number * 20 + 20))))
        assert shared.tokens <= 100
    assert shared.place(b"0", key_of(10, 11, 12)) is None
    place = shared.place(b"1", key_of(982, 983, 984))
    assert shared.match(place, [982, 983, 984], 2).tokens == (985, 986)
    shared.add(b"long", ints(list(range(2 * MOST_OF_ONE))))
    assert shared.tokens == 0
    assert shared.place(b"1", key_of(982, 983, 984)) is None


def test_an_entry_that_another_salt_or_run_has_overwritten_is_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    # All salts have the same mark, and all runs the same place: of all texts, the last run of the last one is found.
    monkeypatch.setattr(suffix, "crc32", lambda salt: 0)
    monkeypatch.setattr(suffix, "keys_of", lambda tokens: np.zeros(len(tokens) - 2, np.int64))
    shared = SharedTexts()
    shared.add(b"one", ints([1, 2, 3, 4, 5]))
    assert shared.place(b"one", 0) == (1, 4)
    assert shared.place(b"other", 0) is None
    shared.add(b"other", ints([5, 6, 7, 8]))
    assert shared.place(b"one", 0) is None
    place = shared.place(b"other", 0)
    assert shared.match(place, [4, 6, 7], 2) is None
    assert shared.match(place, [5, 6, 7], 2) == Match(3, (8,))


def test_what_was_reused_is_kept_once() -> None:
    drafting = Drafting(4)
    prompt = list(range(100, 200))
    drafting.ended(b"", ints([*prompt, 1, 2, 3]))
    kept = drafting.shared.tokens
    drafting.ended(b"", ints([*prompt, 4, 5, 6]), reused=64)
    assert drafting.shared.tokens - kept == 103 - 64 + LONGEST_COMPARED
    drafts = drafting.begin(ints([7, *prompt[:10]]), b"", None, None)
    assert drafts.find_drafts([], 4, drafting.shared).tokens == (110, 111, 112, 113)


def test_a_draft_that_is_refused_at_once_is_not_tried_again_in_every_step() -> None:
    drafts, shared, tried = SequenceDrafts(ints([1, 2, 3] * 9), b"", 4), SharedTexts(), 0
    step = 0
    while step < 200:
        tried += 1
        step += 1 + drafts.verified(drafts.find_drafts([], 4, shared), 0)
    assert tried < 12


def falling(rate: float) -> tuple[float, ...]:
    return tuple(rate**place for place in range(1, 5))


def test_acceptance_is_learned_by_place() -> None:
    drafts, shared = SequenceDrafts(ints([1, 2, 3] * 9), b"", 4), SharedTexts()
    before = drafts.find_drafts([], 4, shared)
    assert before.worth == pytest.approx(falling(before.worth[0]))
    for _ in range(30):
        # The first two are always right, and the third never is.
        drafts.learn(before, 2)
    after = drafts.find_drafts([], 4, shared)
    assert after.worth[1] > 0.9
    assert after.worth[2] < 0.1
    assert after.worth[3] < after.worth[2]


@pytest.mark.parametrize(
    ("each", "rates", "expected"),
    [
        (0.0, [0.9, 0.1], [4, 4]),  # free: all of them
        (0.2, [0.9, 0.1], [4, 0]),  # two rows: a draft must gain more than 0.4 of a token
        (0.6, [0.9, 0.1], [0, 0]),  # more than a token of both rows would take: none
        (0.2, [0.6, 0.6], [1, 1]),
    ],
)
def test_drafts_are_chosen_by_tokens_per_time(each: float, rates: list[float], expected: list[int]) -> None:
    drafting = Drafting(4, costs=LinearCosts(each))
    proposals = [RowDrafts("suffix", "suffix", (1, 2, 3, 4), falling(rate)) for rate in rates]
    assert drafting.choose(proposals, rows=2, most=100) == expected


def test_a_step_has_no_more_drafts_than_room() -> None:
    proposals = [RowDrafts("suffix", "suffix", (1, 2, 3, 4), falling(0.9))] * 3
    assert sum(Drafting(4, costs=LinearCosts(0)).choose(proposals, rows=3, most=5)) == 5


def test_sizes_of_steps_count_once_they_were_measured_twice() -> None:
    costs = LearnedCosts()
    costs.observe(4, 0, 1.0)
    costs.observe(8, 4, 3.0)
    assert costs.ratio(4, 4) == 1.0
    costs.observe(4, 0, 2.0)
    costs.observe(8, 4, 50.0)
    assert costs.ratio(4, 4) == 3.0
    assert costs.ratio(4, 12) == 3.0, "a larger step takes no less"
    assert costs.ratio(4, 1) == 1.5, "between sizes that were seen lies a line"
    assert costs.ratio(4, 2 * 16) == pytest.approx(3.0 * 36 / 20), "trials reach as far as four times as many drafts"


def test_a_few_drafts_are_tried_before_any_were_measured() -> None:
    costs = LearnedCosts()
    for _ in range(2):
        costs.observe(16, 0, 1.0)
    assert costs.ratio(16, 3) == 1.0
    assert costs.ratio(16, 16) > 1.5


def test_sizes_that_a_device_pads_to_count_as_free_until_they_were_measured() -> None:
    costs = LearnedCosts()
    costs.padded = lambda rows, drafts: 8 if drafts <= 4 else 32
    for _ in range(2):
        costs.observe(4, 0, 1.0)
        costs.observe(32, 28, 3.0)
    assert (costs.ratio(4, 1), costs.ratio(4, 28)) == (1.0, 3.0)


def test_costs_of_drafts_are_learned_anew_after_a_while() -> None:
    costs = LearnedCosts()
    for _ in range(2):
        costs.observe(4, 0, 1.0)
        costs.observe(8, 4, 9.0)
    assert costs.ratio(4, 4) == 9.0
    for _ in range(FORGET_AFTER):
        costs.observe(4, 0, 1.0)
    assert costs.ratio(4, 3) == 1.0


def test_of_many_steps_without_drafts_a_few_are_measured_and_the_last_ones_count() -> None:
    costs = LearnedCosts()
    for _ in range(KEPT):
        costs.observe(16, 0, 1.0)
    for _ in range(KEPT * MEASURED_OF):
        costs.observe(16, 0, 3.0)
    assert costs.seconds(16, 0) == 3.0
    for seconds in (0.5, 0.25):
        for _ in range(KEPT // 2 * MEASURED_OF):
            costs.observe(16, 0, seconds)
        assert costs.seconds(16, 0) == seconds, "one of five counts, and half of those that are kept decide"
    for _ in range(NEEDED):
        costs.observe(8, 0, 0.125)
        costs.observe(32, 16, 0.75)
    assert costs.seconds(8, 0) == 0.125, "a size that is not known is measured at once"
    assert costs.ratio(16, 16) == 3.0, "so are steps with drafts"


@pytest.mark.parametrize("before", range(MEASURED_OF))
def test_steps_are_measured_anew_at_once_when_costs_are_forgotten(before: int) -> None:
    costs = LearnedCosts()
    for _ in range(before):
        costs.observe(64, 0, 9.0)
    for _ in range(NEEDED):
        costs.observe(16, 0, 1.0)
    observed = before + NEEDED
    while costs.known(16):
        costs.observe(16, 0, 1.0)
        observed += 1
    assert FORGET_AFTER <= observed < FORGET_AFTER + MEASURED_OF
    costs.observe(16, 0, 2.0)
    assert costs.known(16)
    assert costs.seconds(16, 0) < 2.0, "the step at which they were forgotten counts"


def test_a_small_step_that_was_slow_long_ago_makes_drafts_of_more_rows_no_cheaper() -> None:
    costs = LearnedCosts()
    for _ in range(2):
        costs.observe(5, 0, 10.0)
    for _ in range(8):
        costs.observe(16, 0, 2.0)
        costs.observe(32, 16, 4.0)
    assert (costs.ratio(16, 16), costs.seconds(16, 0)) == (2.0, 2.0)
    assert costs.seconds(8, 0) == 2.0, "it takes no longer than 16 rows"
    assert costs.seconds(20, 0) == 10.0, "nothing larger was measured"


def test_a_large_step_that_was_fast_once_makes_drafts_of_fewer_rows_no_dearer() -> None:
    """Contexts were short then, or a late landing made the next step look short."""
    costs = LearnedCosts()
    for _ in range(8):
        costs.observe(64, 0, 0.5)
    for _ in range(8):
        costs.observe(16, 0, 12.0)
        costs.observe(32, 16, 13.0)
    assert (costs.ratio(16, 16), costs.seconds(16, 0)) == (13 / 12, 12.0)
    while costs.known(16):
        costs.observe(32, 16, 13.0)
    for _ in range(2):
        costs.observe(16, 0, 12.0)
    assert costs.seconds(20, 0) == 12.0, "what was measured long ago says nothing of a size that never was"


def test_drafts_are_compared_with_steps_that_were_measured_lately() -> None:
    costs = LearnedCosts()
    for _ in range(2):
        costs.observe(16, 0, 10.0)
    assert costs.known(16)
    for _ in range(FORGET_AFTER):
        # All rows draft, so no step without drafts shows that the machine is no longer busy.
        costs.observe(32, 16, 4.0)
    assert not costs.known(16), "the next steps have no drafts"
    assert costs.seconds(16, 0) == 10.0, "until then, the old duration is the best guess"
    for _ in range(2):
        costs.observe(16, 0, 2.0)
    assert costs.known(16)
    assert costs.ratio(16, 16) == 2.0


def test_an_engine_without_a_cache_keeps_no_text() -> None:
    for shares, kept in ((True, 7), (False, 0)):
        drafting = Drafting(4, shares=shares)
        drafting.ended(b"", ints([1, 2, 3, 4, 5, 6, 7]))
        assert drafting.shared.tokens == kept


def test_a_row_that_its_model_has_lost_continues_with_short_matches():
    drafts, shared = SequenceDrafts(ints([1, 2, 3, 4, 9, 8, 1]), b"", 4, model="mtp"), SharedTexts()
    assert drafts.find_drafts([2, 3], 4, shared).drafter == "mtp"
    drafts.leave_model()
    assert drafts.find_drafts([2, 3], 4, shared).tokens[:2] == (4, 9)


def test_steps_whose_durations_vary_are_not_flattered_by_the_fastest() -> None:
    costs = LearnedCosts()
    for place in range(KEPT):
        costs.observe(4, 0, 1.0)
        costs.observe(5, 1, 30.0 if place == 0 else 1.1 if place == 1 else 1.4)
        if place == NEEDED - 1:
            assert costs.ratio(4, 1) == pytest.approx(1.1), "the first one was recorded"
    assert costs.ratio(4, 1) == pytest.approx(1.4)


def test_a_small_step_that_waited_says_nothing_of_larger_ones_that_were_measured() -> None:
    costs = LearnedCosts()
    costs.padded = lambda rows, drafts: 32 if drafts else 8
    for _ in range(NEEDED):
        costs.observe(8, 0, 4.0)
        costs.observe(32, 24, 5.0)
    costs.padded = lambda rows, drafts: rows + drafts
    for _ in range(NEEDED):
        costs.observe(4, 3, 6.0)
    assert costs.ratio(8, 24) == 1.25
    assert costs.ratio(8, 8) == 1.25, "one that was not measured takes no longer than a larger one"


def test_sizes_out_of_order_count_as_their_mean_where_every_token_costs() -> None:
    costs = LearnedCosts()
    for _ in range(NEEDED):
        costs.observe(1, 0, 1.0)
        costs.observe(2, 1, 5.0)
    for _ in range(3 * NEEDED):
        costs.observe(4, 3, 1.4)
    assert [costs.ratio(1, drafts) for drafts in (1, 2, 3)] == pytest.approx([2.3] * 3), "one was measured more often"
    for _ in range(KEPT):
        costs.observe(2, 1, 1.2)
    assert [costs.ratio(1, drafts) for drafts in (1, 2, 3)] == pytest.approx([1.2, 1.3, 1.4])
