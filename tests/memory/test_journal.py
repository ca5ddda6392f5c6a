"""A router that reads a journal knows what the engine's cache holds, whatever happens on the way."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine.properties import parts, seed_of, thorough
from tests.support.hashed.mirrored import MirroredEngine, run_mirrored, truth
from tests.support.hashed.rolling import RollingDevice, rolling_spec
from tests.support.hashed.tiered import tiered_workload
from tests.support.hashed.workloads import Workload, random_workload, run_workload
from weft.engine.loop import Engine
from weft.fleet.index import PointIndex
from weft.memory.journal import CacheChanges, Journal, Tier
from weft.memory.keys import PrefixIdentity
from weft.memory.ledger import Ledger

EXAMPLES = int(os.environ.get("WEFT_EXAMPLES", "15"))


def workload_of(seed: int) -> Workload:
    return tiered_workload(seed) if seed % 2 else random_workload(seed, cache=True)


@pytest.mark.parametrize("part", parts(2))
@thorough(EXAMPLES)
@given(seed=st.integers(0, 1 << 40))
def test_after_every_step_the_mirror_is_the_ledger_and_predicts_its_lookups(part, seed):
    seed = seed_of(part, seed)
    run_mirrored(workload_of(seed), seed)


@pytest.mark.parametrize("part", parts(2))
@thorough(EXAMPLES)
@given(seed=st.integers(0, 1 << 40))
def test_a_mirror_that_lost_batches_notices_it_and_starts_over(part, seed):
    seed = seed_of(part, seed)
    run_mirrored(workload_of(seed), seed, loss=0.2)


def test_losses_do_occur_in_these_workloads():
    assert sum(run_mirrored(workload_of(seed), seed, loss=0.2).restarts for seed in range(8)) > 8


def test_without_a_subscriber_nothing_is_watched_or_recorded():
    engine = run_workload(random_workload(3, cache=True)).engine
    assert engine.ledger.cache.watch is None
    assert engine.journal.take() is None


def test_a_journal_without_readers_records_nothing_more():
    engine = run_mirrored(workload_of(1), 1)
    engine.journal.stop()
    assert engine.ledger.cache.watch is None
    assert [link.lower.watch for link in engine.ledger.tiers.links] == [None]
    engine.flush()
    assert engine.journal.take() is None


def filled(most: int) -> tuple[Ledger, Journal]:
    """A ledger with eight cached cells of a model without states, and its journal."""
    ledger = Ledger(rolling_spec(recurrent=False), 1 << 14, seats=1, max_length=64)
    journal = Journal(ledger, epoch=5, most=most)
    lease = ledger.open(0, [bytes([depth]) * 32 for depth in range(8)], 32, 31)
    ledger.advance(lease, 32)
    journal.restart()
    ledger.settle(lease, ledger.snapshot([lease])[0], 32)
    ledger.close(lease)
    return ledger, journal


def test_a_journal_that_overflows_starts_over_with_everything():
    _, roomy = filled(most=100)
    batch = roomy.take()
    assert (batch.fresh, batch.first, len(batch.keys)) == (True, 0, 8)
    ledger, journal = filled(most=3)
    batches = []
    while (batch := journal.take(2)) is not None:
        batches.append(batch)
    assert [batch.fresh for batch in batches] == [True, False, False, False]
    assert [batch.first for batch in batches] == [0, 2, 4, 6]
    assert {key for batch in batches for key in batch.keys} == set(ledger.cache.trie.nodes)
    assert all(set(batch.tiers) == {Tier.DEVICE} for batch in batches)


def test_a_point_that_is_dropped_while_the_rest_is_listed_is_not_listed():
    ledger, journal = filled(most=100)
    journal.take()
    journal.restart()
    first = journal.take(2)
    ledger.cache.clear()
    index = PointIndex()
    mirror = index.add()
    assert index.apply(mirror, first)
    assert len(index.held(mirror)) == 2
    while (batch := journal.take(3)) is not None:
        assert index.apply(mirror, batch)
    assert index.held(mirror) == {}


def test_the_stream_of_a_restarted_engine_does_not_continue_the_old_one():
    """Even if the numbers would fit."""
    index = PointIndex()
    mirror = index.add()
    old = CacheChanges(1, 0, True, (b"a",), (64,), bytes([Tier.DEVICE]), b"\1")
    new = CacheChanges(2, 1, False, (b"b",), (64,), bytes([Tier.DEVICE]), b"\1")
    assert index.apply(mirror, old)
    assert not index.apply(mirror, new)
    assert not index.apply(mirror, replace(new, epoch=1)), "after a gap only a fresh batch counts"
    assert index.apply(mirror, replace(new, first=0, fresh=True))
    assert index.held(mirror) == {b"b": {Tier.DEVICE}}


def test_two_engines_have_different_epochs():
    ledger = Ledger(rolling_spec(), 1 << 14, seats=1, max_length=64)
    assert Journal(ledger).epoch != Journal(ledger).epoch


def test_events_carry_keys_and_positions_but_no_tokens():
    engine = run_mirrored(random_workload(4, cache=True), 4)
    engine.journal.restart()
    batch = engine.journal.take()
    assert all(len(key) == 32 for key in batch.keys)
    assert all(tokens % engine.ledger.cell == 0 for tokens in batch.tokens)


@pytest.mark.parametrize(
    "columns",
    [((b"a",), (), b"\0", b"\1"), ((b"a",), (64,), b"", b"\1"), ((b"a",), (64,), b"\4", b"\1")],
)
def test_a_malformed_batch_is_refused(columns):
    with pytest.raises(ValueError, match=r"columns|tier"):
        CacheChanges(1, 0, True, *columns)


def test_a_load_report_counts_prompt_tokens_and_waiting_requests():
    workload = random_workload(4, cache=True)
    config = workload.config
    engine = Engine(workload.spec, RollingDevice(workload.spec, config.memory_bytes, config.max_sequences), config)
    before = engine.load()
    assert (before.prompt_tokens, before.running, before.waiting) == (0, 0, 0)
    assert before.max_sequences == config.max_sequences
    engine = run_workload(replace(workload, arrivals=workload.arrivals[:1])).engine
    arrival = workload.arrivals[0]
    assert engine.load().prompt_tokens >= len(arrival.prompt)
    assert engine.load().token_bytes * workload.spec.cell == workload.spec.page_bytes


def test_the_same_tokens_under_two_salts_are_different_points():
    engine = run_mirrored(workload_of(5), 5)
    assert isinstance(engine, MirroredEngine)
    prompt = next(a.prompt for a in engine.workload.arrivals if len(a.prompt) >= 8)
    import numpy as np

    cells = np.array(prompt, np.int32)
    ours, theirs = (set(PrefixIdentity(4, salt).keys(cells)) for salt in (b"", b"other"))
    assert not ours & theirs
    assert not theirs & set(truth(engine.ledger))
