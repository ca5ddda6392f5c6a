"""Which replica gets a request: what it saves, what waits there, and what was sent there a moment ago."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.load import ReplicaLoad
from weft.fleet.index import PointIndex
from weft.fleet.router import FleetRouter, RoutingPolicy
from weft.memory.journal import CacheChanges, Tier

CELL = 64
RATE = 1000.0


def keys(name: str, cells: int) -> list[bytes]:
    return [f"{name} {depth}".encode() for depth in range(cells)]


def changes(points: dict[bytes, Tier], epoch: int = 1) -> CacheChanges:
    tiers = bytes(points.values())
    return CacheChanges(epoch, 0, True, tuple(points), (CELL,) * len(points), tiers, b"\1" * len(points))


def fleet(*names: str, policy: RoutingPolicy | None = None, **load: object) -> FleetRouter:
    """Replicas that compute a thousand tokens a second. Time stands still."""
    router = FleetRouter(CELL, policy, clock=lambda: 0.0)
    for name in names:
        router.add(name)
        router.report(name, ReplicaLoad(token_seconds=1 / RATE, **load))
    return router


def saved(router: FleetRouter, prompt: list[bytes]) -> dict[str, int]:
    return {each.replica: each.saved for each in router.choose(prompt, len(prompt) * CELL + 1)}


def send(router: FleetRouter, prompt: list[bytes], tokens: int | None = None, priority: int = 0) -> str:
    length = len(prompt) * CELL + 1 if tokens is None else tokens
    best = router.choose(prompt, length, priority)[0]
    router.assign(best, prompt, length, priority)
    return best.replica


def test_only_a_resume_point_saves_tokens_and_a_page_does_not():
    router, prompt = fleet("a", "b"), keys("x", 8)
    router.apply("a", changes(dict.fromkeys(prompt, Tier.PAGE)))
    router.apply("b", changes({prompt[3]: Tier.DEVICE}))
    assert saved(router, prompt) == {"a": 0, "b": 4 * CELL}


def test_pages_without_a_state_do_not_attract_a_request_to_a_longer_queue():
    router, prompt = fleet("a", "b"), keys("x", 8)
    router.apply("a", changes(dict.fromkeys(prompt, Tier.PAGE)))
    for name in "ab":
        (choice,) = router.choose([], 100, without={"a", "b"} - {name})
        router.assign(choice, [], 100 if name == "b" else 150)
    assert router.choose(prompt, 8 * CELL + 1)[0].replica == "b"


def test_a_choice_names_where_the_prompt_parts_from_what_any_replica_has_computed():
    router, prompt = fleet("a", "b"), keys("x", 8)
    router.apply("a", changes(dict.fromkeys(prompt[:5], Tier.PAGE) | {prompt[1]: Tier.DEVICE}))
    junctions = {each.replica: each.junction for each in router.choose(prompt, 8 * CELL + 1)}
    assert junctions == {"a": 5 * CELL, "b": 5 * CELL}
    router.apply("b", changes({prompt[4]: Tier.DEVICE}, epoch=2))
    junctions = {each.replica: each.junction for each in router.choose(prompt, 8 * CELL + 1)}
    assert junctions == {"a": 5 * CELL, "b": None}, "b resumes there"
    assert {each.junction for each in router.choose(keys("y", 8), 8 * CELL + 1)} == {None}


@given(st.lists(st.integers(0, 12), max_size=4), st.integers(0, 12))
def test_what_is_known_ends_where_the_longest_path_does(lengths, asked):
    router, prompt = fleet(*(str(place) for place in range(len(lengths)))), keys("x", 12)
    for place, length in enumerate(lengths):
        router.apply(str(place), changes(dict.fromkeys(prompt[:length], Tier.PAGE), epoch=place))
    assert router.index.known(prompt[:asked]) == min(asked, max(lengths, default=0))


def test_a_cache_that_got_much_lately_repels_new_prompts_but_not_those_that_it_holds():
    router, prompt = fleet("a", "b"), keys("x", 8)
    router.apply("a", changes({prompt[-1]: Tier.DEVICE}))
    (choice,) = router.choose([], 100, without={"b"})
    router.ended(router.assign(choice, [], 100_000))
    assert router.choose(keys("y", 8), 8 * CELL + 1)[0].replica == "b"
    assert router.choose(prompt, 8 * CELL + 1)[0].replica == "a"


def test_a_point_deeper_than_a_missing_one_is_found():
    """States exist at some positions only."""
    router, prompt = fleet("a"), keys("x", 8)
    router.apply("a", changes({prompt[0]: Tier.DEVICE, prompt[6]: Tier.DEVICE}))
    assert saved(router, prompt) == {"a": 7 * CELL}
    assert saved(router, prompt[:6]) == {"a": CELL}


def test_the_last_token_and_tokens_to_score_are_always_computed():
    router, prompt = fleet("a"), keys("x", 4)
    router.apply("a", changes(dict.fromkeys(prompt, Tier.DEVICE)))
    assert router.choose(prompt, 4 * CELL)[0].saved == 3 * CELL
    assert router.choose(prompt, 4 * CELL + 1)[0].saved == 4 * CELL
    assert router.choose(prompt, 4 * CELL + 1, limit=CELL)[0].saved == CELL


def test_the_expected_time_is_what_waits_and_what_is_left_to_compute():
    router, prompt = fleet("a"), keys("x", 8)
    router.apply("a", changes({prompt[3]: Tier.DEVICE}))
    router.assign(router.choose(keys("y", 2), 500)[0], keys("y", 2), 500)
    (choice,) = router.choose(prompt, 1000)
    assert choice.seconds == pytest.approx((500 + 1000 - 4 * CELL) / RATE)


def test_two_requests_with_the_same_new_prefix_go_to_the_same_replica():
    router, shared = fleet("a", "b", "c"), keys("shared", 30)
    first = send(router, shared + keys("one", 1))
    others = {name for name in router.replicas if name != first}
    assert send(router, shared + keys("two", 1)) == first
    assert saved(router, shared)[first] == 30 * CELL
    assert all(saved(router, shared)[name] == 0 for name in others)


def test_requests_that_share_nothing_are_spread():
    router = fleet("a", "b", "c", "d")
    assert {send(router, keys(str(number), 20)) for number in range(4)} == {"a", "b", "c", "d"}


def test_requests_are_spread_even_if_each_is_answered_before_the_next_one_comes():
    router, chosen = fleet("a", "b", "c", "d"), []
    for number in range(8):
        prompt = keys(str(number), 20)
        best = router.choose(prompt, 20 * CELL)[0]
        router.ended(router.assign(best, prompt, 20 * CELL))
        chosen.append(best.replica)
    assert sorted(chosen) == sorted("abcd" * 2)


def test_a_conversation_stays_where_it_is_until_waiting_there_costs_more_than_moving():
    router, prompt = fleet("a", "b"), keys("x", 30)
    router.apply("b", changes({prompt[-1]: Tier.DEVICE}))
    moved = 0
    for number in range(400):
        best = router.choose(prompt, 30 * CELL + 50)[0]
        if best.replica == "a":
            moved = number
            break
        # Something else is sent to the holder.
        other = next(c for c in router.choose(keys(f"y{number}", 8), 500) if c.replica == "b")
        router.assign(other, keys(f"y{number}", 8), 500)
    # Recomputing costs 1,920 tokens: more than one queued request of 500 tokens, less than a hundred of them.
    assert 4 <= moved <= 100


def test_a_hot_prefix_gets_a_second_holder_when_its_first_one_is_overrun():
    router, hot = fleet("a", "b"), keys("hot", 10)
    router.apply("a", changes({hot[-1]: Tier.DEVICE}))
    sent = [send(router, hot + keys(str(number), 2)) for number in range(400)]
    assert sent[0] == "a"
    assert "b" in sent
    # From then on both of them compute the rest of the prompts.
    assert 80 < sent[200:].count("b") < 120


def test_only_requests_of_the_same_or_a_higher_priority_are_waited_for():
    router = fleet("a")
    router.assign(router.choose([], 500, 5)[0], [], 500, 5)
    router.assign(router.choose([], 300, 1)[0], [], 300, 1)
    waits = {priority: router.choose([], 100, priority)[0].seconds for priority in (0, 1, 5)}
    assert waits == pytest.approx({0: 100 / RATE, 1: 400 / RATE, 5: 900 / RATE})


def test_progress_that_a_replica_reports_shortens_the_wait():
    router = fleet("a")
    router.assign(router.choose([], 5000)[0], [], 5000)
    router.report("a", ReplicaLoad(prompt_tokens=4000, token_seconds=1 / RATE))
    assert router.choose([], 100)[0].seconds == pytest.approx((1000 + 100) / RATE)


def test_requests_of_another_router_count_too():
    router = fleet("a", "b")
    send(router, keys("x", 10))
    router.report("a", ReplicaLoad(token_seconds=1 / RATE, waiting=5))
    router.report("b", ReplicaLoad(token_seconds=1 / RATE, waiting=0))
    assert router.choose(keys("y", 10), 650)[0].replica == "b"


def test_a_tier_is_worth_what_loading_from_it_saves():
    prompt = keys("x", 10)
    quick, slow = 1e6, 10.0
    for rate, expected in ((quick, 10 * CELL), (slow, 2 * CELL)):
        router = fleet("a", load_bytes_per_second=rate, token_bytes=1.0, point_bytes=100)
        router.apply("a", changes({prompt[1]: Tier.DEVICE, prompt[9]: Tier.HOST}))
        choice = router.choose(prompt, 10 * CELL + 1)[0]
        assert choice.saved == expected
        assert choice.loaded == expected - 2 * CELL


def test_ties_go_to_the_replica_that_was_added_first_and_excluded_ones_are_not_chosen():
    router = fleet("z", "m", "a")
    assert [choice.replica for choice in router.choose(keys("x", 3), 200)] == ["z", "m", "a"]
    assert [choice.replica for choice in router.choose(keys("x", 3), 200, without={"z"})] == ["m", "a"]
    assert router.choose(keys("x", 3), 200, without={"z", "m", "a"}) == []


def test_a_replica_that_has_gone_takes_its_points_and_requests_along():
    router, prompt = fleet("a", "b"), keys("x", 6)
    router.apply("a", changes({prompt[-1]: Tier.DEVICE}))
    number = router.assign(router.choose(prompt, 400)[0], prompt, 400)
    router.remove("a")
    router.started(number)
    router.ended(number)
    router.add("a")
    assert saved(router, prompt) == {"a": 0, "b": 0}
    assert router.pending == 0


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 1 << 40))
def test_the_index_is_the_sets_that_it_stands_for(seed):
    """Random streams that start over, replicas that come and go: against plain sets of (key, tier)."""
    random, index = Random(seed), PointIndex()
    names = [bytes([number]) for number in range(12)]
    mirrors = {place: index.add() for place in range(3)}
    sets: dict[int, set[tuple[bytes, Tier]]] = {place: set() for place in mirrors}
    for _ in range(random.randint(1, 60)):
        place = random.choice(list(mirrors))
        if random.random() < 0.1:
            index.remove(mirrors[place])
            mirrors[place], sets[place] = index.add(), set()
        fresh = mirrors[place].next is None or random.random() < 0.2
        rows = [(random.choice(names), random.choice(list(Tier)), random.random() < 0.6) for _ in range(8)]
        if fresh:
            sets[place] = set()
        for key, tier, held in rows:
            (sets[place].add if held else sets[place].discard)((key, tier))
        columns = tuple(r[0] for r in rows), (CELL,) * 8, bytes(r[1] for r in rows), bytes(r[2] for r in rows)
        assert index.apply(mirrors[place], CacheChanges(7, mirrors[place].next or 0, fresh, *columns))
        for each, mirror in mirrors.items():
            assert {(key, tier) for key, tiers in index.held(mirror).items() for tier in tiers} == sets[each]
            assert sum(mirror.points) == len(sets[each])


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 1 << 40))
def test_when_all_requests_have_ended_nothing_of_them_is_left(seed):
    random, router, open_numbers = Random(seed), fleet("a", "b", "c"), []
    for step in range(80):
        if open_numbers and random.random() < 0.5:
            number = open_numbers.pop(random.randrange(len(open_numbers)))
            router.started(number) if random.random() < 0.5 else None
            router.ended(number)
        elif random.random() < 0.05:
            name = random.choice(list(router.replicas))
            router.remove(name)
            router.add(name)
        else:
            prompt = keys(random.choice("xyz"), random.randint(0, 5)) + keys(str(step), random.randint(0, 3))
            tokens = len(prompt) * CELL + random.randint(1, 60)
            open_numbers.append(router.assign(random.choice(router.choose(prompt, tokens)), prompt, tokens))
    for number in open_numbers:
        router.ended(number)
    assert router.pending == 0
    assert all(not replica.unstarted and not replica.open for replica in router.replicas.values())


def test_forgetting_a_replica_touches_only_what_it_held():
    class Counting(dict):
        touched = 0

        def __getitem__(self, key):
            self.touched += 1
            return super().__getitem__(key)

        def __iter__(self):
            self.touched += len(self)
            return super().__iter__()

        def get(self, key, default=None):
            self.touched += 1
            return super().get(key, default)

    def held(names: list[bytes], first: int = 0, fresh: bool = True) -> CacheChanges:
        count = len(names)
        return CacheChanges(1, first, fresh, tuple(names), (CELL,) * count, bytes(count), b"\1" * count)

    index = PointIndex()
    small, large = index.add(), index.add()
    own = [b"small %d" % number for number in range(20)]
    index.apply(small, held(own))
    index.apply(large, held([b"large %d" % number for number in range(5000)]))
    index.masks = Counting(index.masks)
    index.remove(small)
    assert index.apply(large, held([], large.next or 0, fresh=False))
    assert index.masks.touched == len(own)
    assert len(index.masks) == 5000
    # Its lane is free again.
    assert index.add().lane == small.lane
