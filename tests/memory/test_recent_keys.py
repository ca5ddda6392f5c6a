"""What is remembered of keys that are gone is bounded, and the latest are among it."""

from __future__ import annotations

from collections import OrderedDict
from random import Random

import pytest

from weft.memory.misses import Ghosts, Lost, Reason, Tenants
from weft.memory.recent_keys import RecentKeys


@pytest.mark.parametrize("seed", range(20))
def test_the_last_keys_are_known_with_their_numbers_and_no_more_than_the_limit(seed: int) -> None:
    random, most = Random(seed), 16
    table, oracle = RecentKeys(most), OrderedDict[bytes, int]()
    keys = [random.randbytes(32) for _ in range(40)]
    for _ in range(2000):
        key = random.choice(keys)
        if random.random() < 0.7:
            value = random.getrandbits(50)
            table.add(key, value)
            oracle[key] = value
            oracle.move_to_end(key)
        else:
            found, known = table.pop(key), oracle.pop(key, None)
            assert found in (known, None)
        assert len(table) <= most
        for late in list(oracle)[-(most // 2) :]:
            # What was removed makes room for none: fewer than half may be known then.
            assert table.get(late) in (oracle[late], None)
        assert all(each not in table for each in keys if each not in oracle)
    for number, key in enumerate(keys):
        table.add(key, number)
    assert [table.get(key) for key in keys[-(most // 2) :]] == list(range(40))[-(most // 2) :]
    table.clear()
    assert not len(table)
    assert keys[-1] not in table


@pytest.mark.parametrize("reason", [Reason.STATE_EVICTED, Reason.STATE_SKIPPED])
@pytest.mark.parametrize(("kind", "used"), [(None, 0), (0, 1), (143, (1 << 40) + 7)])
def test_a_lost_state_is_remembered_as_it_was(reason: Reason, kind: int | None, used: int) -> None:
    ghosts, key = Ghosts(), b"k" * 32
    ghosts.add_state(key, Lost(reason, kind, used))
    assert ghosts.reason([key], 0, 1) is reason
    assert ghosts.forget_state(key) == Lost(reason, kind, used)
    assert ghosts.forget_state(key) is None


def test_ghosts_and_tenants_are_bounded() -> None:
    random, ghosts, tenants = Random(1), Ghosts(100), Tenants(100)
    for _ in range(1000):
        ghosts.add_cell(random.randbytes(32))
        ghosts.add_state(random.randbytes(32), Lost(Reason.STATE_SKIPPED))
        tenants.add(random.randbytes(32), random.randbytes(32))
    assert len(ghosts._cells) <= 100
    assert len(ghosts._states) <= 100
    assert len(tenants._last) <= 100
