"""What goes first when memory runs out, by each policy; and what eviction leaves behind."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.hashed.rolling import rolling_spec
from tests.support.hashed.workloads import random_workload, run_workload
from weft.memory.eviction import POLICIES, CandidateFacts, Ranking, by_flops, by_value, work_per_byte
from weft.memory.keys import PrefixIdentity
from weft.memory.ledger import Ledger
from weft.memory.trie import Node, resume_at_or_above


def ledger(memory: int = 1 << 14, **spec: object) -> Ledger:
    return Ledger(rolling_spec(**spec), memory, seats=4, max_length=400, capture_every=8)


def compute(target: Ledger, tokens: list[int], seat: int = 0) -> int:
    """Run a sequence through the ledger alone; where it resumed."""
    array = np.array(tokens, np.int32)
    cell = target.spec.cell
    lease = target.open(seat, PrefixIdentity(cell).keys(array), len(tokens), len(tokens) - 1)
    cached = lease.miss.cached
    assert target.advance(lease, len(tokens)) is not None
    target.settle(lease, target.snapshot([lease])[seat], len(tokens))
    target.close(lease)
    return cached


def test_the_value_of_a_candidate_is_wants_times_tokens_per_byte() -> None:
    base = by_value(0.25, 64, 64)
    assert by_value(0.25, 128, 64) == 2 * base
    assert by_value(0.25, 64, 128) == base / 2
    assert by_value(0.5, 64, 64) == 2 * base


def test_the_published_policy_weighs_work_per_byte_against_recency() -> None:
    much, little = CandidateFacts(1024, 1024, 64, used=5), CandidateFacts(64, 1024, 64, used=6)
    assert by_flops(0.0, 100, 16)(much) < by_flops(0.0, 100, 16)(little)
    assert by_flops(1.0, 100, 16)(much) > by_flops(1.0, 100, 16)(little)
    # Deep tokens cost more to compute.
    assert work_per_byte(CandidateFacts(64, 80_000, 64, 1)) > 2 * work_per_byte(CandidateFacts(64, 64, 64, 1))


def test_a_ranking_notices_what_was_used_since_it_was_ranked() -> None:
    nodes = [Node(bytes([i]), None, i, used=i) for i in range(4)]
    ranking = Ranking(lambda node: float(node.used), lambda node: node.pins == 0)
    for node in nodes:
        ranking.offer(node)
    nodes[0].used = 9
    nodes[1].pins = 1
    assert [ranking.pop() for _ in range(3)] == [nodes[2], nodes[3], nodes[0]]
    assert ranking.pop() is None


def test_least_recently_used_goes_first_under_lru() -> None:
    target = Ledger(rolling_spec(recurrent=False), 24 * 128, seats=4, max_length=400, eviction="lru")
    first, second = list(range(40)), list(range(50, 90))
    compute(target, first)
    compute(target, second)
    compute(target, first)
    compute(target, list(range(100, 140)))
    assert compute(target, first) == 36
    assert compute(target, second) < 36


def test_states_are_thinned_before_paths_are_cut() -> None:
    """Under pressure a deep path loses the resume points that everyone passes; its end still serves as a start."""
    target = ledger(memory=40 * 1024, heavy=True)
    path = list(range(90))
    for _ in range(4):
        compute(target, path)
    keys = PrefixIdentity(target.cell).keys(np.array(path, np.int32))[:22]
    nodes = target.cache.trie.nodes
    for other in range(100, 120):
        compute(target, [other] * 30)
    assert target.cache.counts.evicted_points > 0
    assert all(key in nodes for key in keys)
    assert sum(nodes[key].resume is not None for key in keys) < len(keys)
    assert compute(target, path) == 88


def test_a_point_that_became_the_end_of_its_path_is_ranked_with_the_pages_that_it_keeps() -> None:
    target = ledger(memory=40 * 1024)
    compute(target, list(range(90)))
    cache = target.cache
    end = max((node for node in cache.trie.nodes.values() if node.resume), key=lambda node: node.depth)
    above = resume_at_or_above(end.parent)
    assert above is not None
    before = above.stamp
    cache._evict_point(end.resume)
    above.heir_of = None
    value = cache.valuation.score(above)
    while (leaf := cache.valuation.pop_useless()) is not None:
        cache._evict(leaf)
    assert cache.valuation.score(above) < value
    # It stands in the ranking anew, or its old, higher place would protect it.
    assert above.stamp > before


def test_an_evicted_state_leaves_its_pages_and_an_evicted_page_takes_what_hangs_on_it() -> None:
    target = ledger()
    compute(target, list(range(32)))
    trie = target.cache.trie
    assert len(trie) == 8
    point = next(node.resume for node in trie.nodes.values() if node.resume)
    target.cache._evict_point(point)
    assert len(trie) == 8
    target.cache.clear()
    assert len(trie) == 0
    assert target.arena.used_slabs == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_answers_right_and_memory_bounded(policy: str) -> None:
    for seed in range(20):
        workload = random_workload(seed, count=6, eviction=policy, cache=True)
        run = run_workload(workload)
        assert all(finish is not None for finish in run.finished.values())


def test_an_optional_snapshot_never_pushes_out_much() -> None:
    """With memory full of pages that others need, a snapshot is skipped and counted, and the request goes on."""
    target = Ledger(rolling_spec(heavy=True), 8 * 1024, seats=4, max_length=400, capture_every=4)
    lease = target.open(0, PrefixIdentity(4).keys(np.arange(60, dtype=np.int32)), 60, 59)
    assert target.advance(lease, 60) is not None
    target.snapshot([lease])
    assert target.cache.counts.captures_skipped > 0
