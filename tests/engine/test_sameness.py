"""Every family answers the same, whatever the cache, the chunks, the company, the pipeline and the memory.

The reference is a cacheless run of each request alone; then the same requests meet in one engine under each scenario.
Freed memory is filled with NaN throughout, and every step is audited.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.support.engine.sameness import (
    LONGEST,
    admit_everything,
    asks,
    check,
    check_answers_do_not_depend_on_how_they_are_computed,
    scenarios,
)
from tests.support.models.engines import (
    FAMILIES,
    make_engine,
    serve,
    smallest_memory,
)


@pytest.mark.parametrize(("family", "scenario"), scenarios())
def test_answers_do_not_depend_on_how_they_are_computed(family: str, scenario: str) -> None:
    check_answers_do_not_depend_on_how_they_are_computed(family, scenario)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_same_where_memory_evicts_and_preempts(family: str) -> None:
    evicted = preempted = 0
    # A policy sees no layers, so each of the other two meets every second family.
    other = ("lru", "flops")[list(FAMILIES).index(family) % 2]
    for depth, eviction, slack in ((0, "value", 1.0), (1, other, 1.3)):
        memory = int(slack * smallest_memory(family, LONGEST))
        engine = make_engine(family, memory, depth=depth, eviction=eviction, max_tokens_per_step=100)
        admit_everything(engine)
        check(family, list(asks()), serve(engine, list(asks())), list(range(len(asks()))))
        evicted += engine.ledger.cache.counts.evicted_pages + engine.ledger.cache.counts.evicted_points
        preempted += engine.planner.preemptions
    assert evicted
    assert preempted


@pytest.mark.parametrize("family", FAMILIES)
def test_aborts_and_the_order_of_arrival_change_nothing_for_the_others(family: str) -> None:
    random = Random(family)
    for depth in (0, 1):
        order = random.sample(range(len(asks())), len(asks()))
        requests = [
            replace(asks()[i], step=random.randint(0, 6), abort_after=random.choice([None, None, 0, 2, 5, 9]))
            for i in order
        ]
        memory = int(1.4 * smallest_memory(family, LONGEST))
        engine = make_engine(family, memory, depth=depth, max_tokens_per_step=random.choice([20, 64, 300]))
        check(family, requests, serve(engine, requests), order)
        assert not engine.ledger.leases
