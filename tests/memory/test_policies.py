"""What is kept and what goes first, on the ledger alone: origins, what is learned of them, candidates, junctions."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest

from tests.support.hashed.rolling import rolling_spec
from weft.memory.audit import audit
from weft.memory.captures import CaptureReasons, Origin, candidates, density, origin_of
from weft.memory.keys import PrefixIdentity
from weft.memory.ledger import Ledger
from weft.memory.misses import Reason, ranked_misses
from weft.memory.popularity import Popularity, class_of, rates
from weft.memory.trie import ResumePoint

CELL = 4


def make(memory: int = 1 << 20, **settings: object) -> Ledger:
    return Ledger(rolling_spec(heavy=True), memory, seats=4, max_length=4000, **settings)


def compute(target: Ledger, tokens: list[int], answer: int = 0, **more: object) -> int:
    """Run a sequence through the ledger alone: a prompt, then an answer; where it resumed."""
    array = np.array(tokens, np.int32)
    prompt = len(tokens) - answer
    keys = PrefixIdentity(CELL).keys(array)
    lease = target.open(0, keys, prompt, prompt - 1, **more)
    cached = lease.miss.cached
    for end in (prompt, len(tokens)):
        if end > int(target.planned[0]):
            assert target.advance(lease, end) is not None
            target.settle(lease, target.snapshot([lease])[0], end)
    target.close(lease)
    audit(target)
    return cached


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 90, length).tolist()


def points(target: Ledger) -> dict[int, ResumePoint]:
    return {n.depth * CELL: n.resume for n in target.cache.trie.nodes.values() if n.resume}


# origins --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (64, Origin.DECLARED),
        (128, Origin.JUNCTION),
        (192, Origin.BOUNDARY),
        (256, Origin.RECALLED),
        (512, Origin.REGULAR),
        (576, Origin.CANDIDATE),
        (960, Origin.PROMPT_END),
        (1088, Origin.REGULAR),
    ],
)
def test_every_kept_position_has_a_reason(position, expected):
    known = {"prompt": 1000, "junction": 128, "asked": {64}, "boundaries": {192}, "every": 512, "cell": 64}
    assert origin_of(position, recalled=256, **known) is expected


def test_a_point_tells_why_it_is_there_and_the_end_of_a_sequence_outranks_the_rest():
    target = make(captures=CaptureReasons(candidates=False), capture_every=64)
    compute(target, text(1, 50), answer=9, boundaries=(13,))
    assert {at: point.origin for at, point in points(target).items()} == {
        12: Origin.BOUNDARY,
        40: Origin.PROMPT_END,
        48: Origin.ANSWER_END,
    }
    # An answer that stays inside its cell ends where its prompt does: the next turn will go on from there.
    compute(target, text(2, 42), answer=1)
    assert points(target)[40].origin is Origin.ANSWER_END


def test_each_reason_can_be_switched_off():
    off = CaptureReasons(
        junction=False, popular=False, boundaries=False, regular=False, answers=False, candidates=False
    )
    target = make(captures=off)
    compute(target, text(1, 50), answer=9, boundaries=(13,))
    compute(target, text(1, 30) + text(2, 30))
    assert {point.origin for point in points(target).values()} == {Origin.PROMPT_END}


# second sighting ------------------------------------------------------------------------------------------------------


def test_a_shared_beginning_hits_when_it_is_seen_for_the_second_time():
    target = make()
    compute(target, text(1, 90) + text(2, 50))
    assert compute(target, text(1, 90) + text(3, 50)) == 88


def test_without_candidates_it_takes_a_third():
    target = make(captures=CaptureReasons(candidates=False, regular=False))
    compute(target, text(1, 90) + text(2, 50))
    assert compute(target, text(1, 90) + text(3, 50)) == 0
    assert compute(target, text(1, 90) + text(4, 50)) == 88


def test_a_message_that_ends_is_hit_by_the_next_conversation():
    target = make(captures=CaptureReasons(candidates=False, regular=False))
    compute(target, text(1, 90) + text(2, 50), boundaries=(90,))
    assert compute(target, text(1, 90) + text(3, 50)) == 88


def test_candidates_take_only_what_nobody_uses_and_go_first():
    target = make(memory=60 * 1024)
    compute(target, text(1, 203))
    assert [point.origin for point in points(target).values()].count(Origin.CANDIDATE) > 5
    for seed in range(2, 8):
        compute(target, text(seed, 40), answer=5)
    assert target.cache.counts.evicted_points > 5
    # Candidates went; the end of the prompt that had left them did not.
    assert compute(target, text(1, 203)) == 200


def test_a_candidate_that_is_hit_is_one_no_longer():
    target = make()
    compute(target, text(1, 90) + text(2, 50))
    compute(target, text(1, 90) + text(3, 50))
    assert points(target)[88].origin is Origin.JUNCTION
    counts = target.cache.counts
    # Once written as a candidate, now counted as a snapshot.
    assert counts.candidates_held == counts.kept[Origin.CANDIDATE] < counts.candidates
    assert counts.kept[Origin.JUNCTION] == 1


def test_candidates_that_go_are_no_longer_held():
    target = make()
    compute(target, text(1, 203))
    counts = target.cache.counts
    assert counts.candidates_held == counts.candidates > 5
    target.cache.clear()
    assert counts.candidates_held == 0


def test_candidates_are_fewer_where_nobody_wants_them():
    target = make()
    counts = []
    for seed in range(140):
        before = target.cache.counts.kept[Origin.CANDIDATE]
        compute(target, text(seed, 100))
        counts.append(target.cache.counts.kept[Origin.CANDIDATE] - before)
    assert counts[0] > 3 * counts[-1]
    compute(target, text(0, 60) + text(999, 40))
    assert density(target.cache.unproved) == 1


def test_candidates_lie_a_share_of_their_depth_apart_and_agree_for_all_prompts():
    whole = candidates(0, 50_000, 64)
    assert candidates(1000, 20_000, 64) == [p for p in whole if 1000 < p <= 20_000]
    assert all(later - earlier <= max(64, earlier / 8) for earlier, later in pairwise(whole))
    assert candidates(0, 50_000, 64, density=8) == whole[7::8]


def test_ends_of_prompts_that_nobody_sends_again_are_candidates():
    target = make(memory=1 << 23)
    for seed in range(100):
        compute(target, text(seed, 100))
    before = target.cache.counts.kept[Origin.PROMPT_END]
    for seed in range(100, 140):
        compute(target, text(seed, 100))
    assert target.cache.counts.kept[Origin.PROMPT_END] - before == 40 // 8
    # They are there all the same, as long as memory is free.
    assert compute(target, text(139, 100)) == 96


def test_ends_that_are_wanted_now_and_then_are_candidates_only_while_memory_is_free():
    known = Popularity()
    kind = class_of(Origin.PROMPT_END, 0, 0)
    for seed in range(100):
        known.entered(kind)
        if seed % 50 == 0:
            known.wanted(kind)
    kept = {}
    for memory in (1 << 23, 1 << 16):
        target = make(memory=memory)
        for seed in range(60):
            compute(target, text(seed, 100))
        target.cache.valuation.popularity = known
        before = target.cache.counts.kept[Origin.PROMPT_END]
        for seed in range(60, 76):
            compute(target, text(seed, 100))
        kept[memory] = target.cache.counts.kept[Origin.PROMPT_END] - before
    assert kept[1 << 23] == 16 // 8
    assert kept[1 << 16] > 16 // 2


# what is learned ------------------------------------------------------------------------------------------------------


def test_a_class_is_worth_what_became_of_its_members():
    learned = Popularity()
    ends, junctions = class_of(Origin.ANSWER_END, 0, 0), class_of(Origin.JUNCTION, 1, 0)
    for _ in range(50):
        learned.entered(ends)
        learned.entered(junctions)
        learned.wanted(junctions)
    assert learned.chance(junctions) > 0.9
    assert learned.chance(ends) < 0.1
    # Declared points have somebody's word.
    declared = class_of(Origin.DECLARED, 0, 0)
    for _ in range(50):
        learned.entered(declared)
    assert learned.chance(declared) == 0.5


def learned_from(age_of_return: int) -> Popularity:
    """Of a hundred answers every other one is wanted again, so long after."""
    learned = Popularity()
    for number in range(100):
        learned.entered(class_of(Origin.ANSWER_END, 0, 0))
        if number % 2:
            learned.wanted(class_of(Origin.ANSWER_END, 0, 0), age_of_return)
    for _ in range(4096):
        learned.looked_up()
    return learned


def test_what_comes_back_soon_or_never_is_worth_less_the_older_it_is():
    learned, kind = learned_from(age_of_return=4), class_of(Origin.ANSWER_END, 0, 0)
    found = [learned.rate(kind, age) for age in (0, 64, 256, 1024)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 50 * found[-1]


def test_what_comes_back_late_is_worth_more_the_nearer_its_time():
    learned, kind = learned_from(age_of_return=400), class_of(Origin.ANSWER_END, 0, 0)
    assert learned.rate(kind, 0) < learned.rate(kind, 64) < learned.rate(kind, 300)
    assert learned.rate(kind, 4000) < learned.rate(kind, 300) / 10


def test_the_index_of_a_wait_is_its_best_ratio_of_wants_to_time():
    random = Random(3)
    for _ in range(50):
        lasted = [random.uniform(1, 9) for _ in range(7)]
        wanted = [random.choice((0.0, random.random())) for _ in range(7)]
        for age, found in enumerate(rates(lasted, wanted)):
            ends = range(age + 1, 8)
            assert found == pytest.approx(max(sum(wanted[age:end]) / sum(lasted[age:end]) for end in ends))


def test_a_class_that_nobody_has_seen_is_taken_for_what_others_hit_as_often_are():
    learned, unseen = Popularity(), class_of(Origin.BOUNDARY, 2, 0)
    before = learned.rate(unseen, 0)
    for _ in range(200):
        learned.entered(class_of(Origin.JUNCTION, 2, 0))
    for _ in range(16):
        learned.looked_up()
    assert learned.rate(unseen, 0) < before / 2


def test_a_hit_after_passes_counts_for_all_classes_on_the_way():
    learned = Popularity()
    learned.wanted(class_of(Origin.JUNCTION, 1, 2))
    before = Popularity()
    for passes in range(3):
        kind = class_of(Origin.JUNCTION, 1, passes)
        assert learned.chance(kind) > before.chance(kind)


def test_what_was_evicted_and_then_wanted_counts_as_wanted():
    target = make(captures=CaptureReasons(candidates=False))
    compute(target, text(1, 60))
    end = points(target)[56]
    kind = class_of(end.origin, 0, 0)
    before = target.cache.valuation.popularity.chance(kind)
    target.cache._evict_point(end)
    compute(target, text(1, 60))
    assert target.cache.valuation.popularity.chance(kind) > before


def test_who_wanted_an_evicted_point_will_want_the_one_above_it():
    target = make(captures=CaptureReasons(candidates=False, regular=False))
    compute(target, text(1, 90), boundaries=(40,))
    above, end = points(target)[40], points(target)[88]
    before = target.cache.valuation.score(above)
    target.cache._evict_point(end)
    assert above.heir_of == (end.kind, end.used)
    assert target.cache.valuation.score(above) > before


def test_snapshots_that_nobody_hit_do_not_push_out_those_that_were():
    target = make(memory=48 * 1024)
    warm = [text(seed, 60) for seed in (1, 2)]
    for _ in range(4):
        for prompt in warm:
            compute(target, prompt)
    for seed in range(100, 160):
        compute(target, text(seed, 70), boundaries=(20, 40))
        for prompt in warm:
            assert compute(target, prompt) == 56
    assert target.cache.counts.evicted_points > 50


def test_a_beginning_is_known_again_after_its_pages_are_gone():
    target = make(captures=CaptureReasons(candidates=False), capture_every=4096)
    compute(target, text(1, 90) + text(2, 50))
    target.cache._evict_point(points(target)[136])
    while (victim := target.cache.valuation.pop_least()) is not None:
        target.cache._evict(victim)
    assert not target.cache.trie.nodes
    assert compute(target, text(1, 90) + text(3, 50)) == 0
    assert points(target)[88].origin is Origin.RECALLED
    assert compute(target, text(1, 90) + text(4, 50)) == 88
    assert points(target)[88].origin is Origin.JUNCTION


# reasons --------------------------------------------------------------------------------------------------------------


def test_reasons_are_ranked_by_what_they_cost():
    lookups = {Reason.NEVER_COMPUTED: 3, Reason.EVICTED: 1, Reason.NOTHING_MORE: 5}
    lost = {Reason.NEVER_COMPUTED: 100, Reason.EVICTED: 900, Reason.NOTHING_MORE: 0}
    found = ranked_misses(lookups, lost)
    assert [each["reason"] for each in found] == ["evicted", "never_computed", "nothing_more"]
    assert found[0]["sentence"] == "the next 64 tokens were evicted"
