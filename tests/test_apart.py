"""Prefill and decode apart, on the rolling-hash device: whatever the wire does, answers are those of one engine."""

from __future__ import annotations

import pytest

from tests.apart import run_pair


@pytest.mark.parametrize("exact", [False, True])
def test_answers_do_not_depend_on_what_happens_to_transfers(exact):
    for seed in range(16):
        run_pair(seed, exact=exact)


def test_most_prefixes_arrive_on_a_good_wire_and_are_not_computed_again():
    """Otherwise the test above would hold for engines that refuse all transfers."""
    loaded = confirmed = 0
    for seed in range(16):
        pair = run_pair(seed)
        tiers = pair.decode.ledger.tiers
        assert tiers is not None
        assert tiers.arrivals is not None
        loaded, confirmed = loaded + tiers.arrivals.loaded_tokens, confirmed + pair.wire.confirmed
    assert confirmed > 30
    assert loaded > 100


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_answers_do_not_depend_on_transfers_in_many_workloads(exact):
    for seed in range(1000, 1600):
        run_pair(seed, exact=exact)
