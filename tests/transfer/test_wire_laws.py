"""Whatever a wire does, answers are those of a single engine, and most prefixes arrive instead of being computed again.

On the rolling-hash device. `pushed` and `pulled`: the sender writes, or the receiver reads.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.hashed.disaggregated import Pair, run_pair
from tests.support.tiers.load_choice import tiers_of

WIRES = {"pushed": False, "pulled": True}
SEEDS = range(16)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("wire", WIRES)
def test_every_answer_is_the_oracles_and_most_prefixes_arrive(wire: str, exact: bool) -> None:
    """An engine that refused all transfers would answer rightly too."""
    seen = Counter[str]()
    for seed in SEEDS:
        seen.update(happened(run_pair(seed, exact=exact, pulled=WIRES[wire])))
    assert seen["confirmed"] > 20, seen
    assert seen["loaded"] > 80, seen


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("wire", WIRES)
def test_every_answer_is_the_oracles_often(wire: str, exact: bool) -> None:
    for seed in range(1000, 1300):
        run_pair(seed, exact=exact, pulled=WIRES[wire])


def happened(pair: Pair) -> Counter[str]:
    arrivals = tiers_of(pair.decode).arrivals
    assert arrivals is not None
    return Counter(confirmed=pair.wire.confirmed, loaded=arrivals.loaded_tokens)
