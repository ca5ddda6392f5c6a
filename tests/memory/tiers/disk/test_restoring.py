"""What a file holds is entered and dropped in bounded parts, however long its paths are, and however many units."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from tests.support.tiers.restoring import SPEC, TENANTS, filled
from weft.memory.cache import Cache
from weft.memory.kinds import Kind
from weft.memory.tenancy import Tenancy
from weft.memory.tiers.disk import restoring
from weft.memory.tiers.disk.file import DiskFile
from weft.memory.tiers.disk.restoring import CLIMBED_PER_CELL, Restoring
from weft.memory.tiers.disk.tier import disk_cache
from weft.memory.trie import Node


def restored(file: DiskFile) -> tuple[Restoring, Cache]:
    cache = disk_cache(SPEC, file, "value")
    return Restoring(cache, file, Tenancy(lambda: [cache.trie])), cache


def test_a_step_enters_no_more_cells_than_it_may_however_long_a_path_is() -> None:
    file, paths = filled([300, 1, 40])
    found, cache = restored(file)
    calls = 0
    while found.enter_some(10):
        calls += 1
        before = len(cache.trie)
        found.enter_some(7)
        assert len(cache.trie) <= before + 7
    assert len(cache.trie) == 341
    assert all(cache.trie.deepest(keys).depth == len(keys) for keys in paths)
    # Each cell is entered once, the way to it is looked for once, it is offered once, and then it is found to be there.
    assert calls <= 341 * (2 + 2 / CLIMBED_PER_CELL) / 17 + 1
    assert list(found.held()) == []


def test_a_step_offers_no_more_cells_for_eviction_than_it_may_however_long_a_path_is(monkeypatch) -> None:
    file, _ = filled([300])
    found, cache = restored(file)
    offered: list[Node] = []
    offer = cache.valuation.offer
    monkeypatch.setattr(cache.valuation, "offer", lambda node: (offered.append(node), offer(node)))
    while found.enter_some(10):
        assert len(offered) <= 10 * CLIMBED_PER_CELL
        offered.clear()


def test_a_cell_that_was_dropped_before_its_path_is_complete_is_not_offered_for_eviction(monkeypatch) -> None:
    file, paths = filled([30])
    found, cache = restored(file)
    found.enter_some(20)
    node = cache.trie.deepest(paths[0])
    assert node is not None
    assert 0 < node.depth < 30
    cache.drop_cell(node)
    monkeypatch.setattr(cache.valuation, "offer", lambda each: None if each is not node else pytest.fail("is gone"))
    while found.enter_some(10):
        pass


@pytest.mark.parametrize("seed", range(40))
def test_lookups_drops_and_steps_in_any_order_leave_no_unit_without_an_owner(seed: int) -> None:
    random = Random(f"restored {seed}")
    file, paths = filled([random.randint(1, 30) for _ in range(6)])
    found, cache = restored(file)
    rows = found.rows_to_drop(random.choice([None, *TENANTS]))
    entered: set[bytes] = set()
    more = True
    while more:
        work = random.choice(["enter", "look up", "drop", "evict"])
        if work == "enter":
            more = found.enter_some(random.randint(1, 9))
        elif work == "look up":
            keys = random.choice(paths)
            found.enter_path(keys[: random.randint(1, len(keys))])
        elif work == "drop" and not rows.ended:
            rows.drop_some(random.randint(1, 5))
        elif work == "evict" and random.random() < 0.2:
            leaves = [node for node in cache.trie.nodes.values() if not node.children]
            if leaves:
                cache.drop_cell(random.choice(leaves))
        entered.update(cache.trie.nodes)
        held = [*(unit for _, unit in found.held()), *(node.page for node in cache.trie.nodes.values())]
        assert sorted(held) == sorted(cache.arena.owners[Kind.PAGE])
        assert len(set(held)) == len(held)
    assert list(found.held()) == []


class CountedRows:
    """The rows of a file; counts those that are looked at."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self.looked = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int | slice) -> np.ndarray:
        found = self.rows[place]
        self.looked += len(found) if isinstance(place, slice) else 1
        return found


@pytest.mark.parametrize("tenant", [None, TENANTS[1]])
def test_a_drop_looks_at_a_bounded_part_of_a_file_in_each_step(tenant: bytes | None, monkeypatch) -> None:
    monkeypatch.setattr(restoring, "ROWS_PER_LOOK", 32)
    file, _ = filled([30] * 12)
    found, _ = restored(file)
    file.rows = counted = CountedRows(file.rows)
    rows, dropped = found.rows_to_drop(tenant), 0
    for most in steps(rows):
        counted.looked = 0
        pages = rows.drop_some(most)
        # Each dropped unit is looked at again, for its key and for its place.
        assert counted.looked <= 32 + 2 * most
        assert pages <= most
        dropped += pages
    assert dropped == (360 if tenant is None else 180)
    left = {unit for _, unit in found.held()}
    assert len(left) == 360 - dropped
    file.rows = counted.rows


def steps(rows: restoring.RowsToDrop) -> Iterator[int]:
    for number in range(200):
        if rows.ended:
            return
        yield 5 + number % 3
    raise AssertionError("it has no end")
