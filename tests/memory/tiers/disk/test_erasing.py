"""What is left to be overwritten is known at any time, and without looking at every unit."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest

from tests.support.tiers.disk_blocks import FlakyBlocks
from tests.support.tiers.restoring import SPEC, TENANTS, filled
from weft.base.copies import CopyPlan
from weft.engine.copying import Copier
from weft.memory.arena import Arena
from weft.memory.kinds import Kind
from weft.memory.tenancy import Tenancy
from weft.memory.tiers.disk import erasing as erasing_module
from weft.memory.tiers.disk.erasing import Erasing
from weft.memory.tiers.disk.file import DiskFile
from weft.memory.tiers.disk.restoring import Restoring
from weft.memory.tiers.disk.tier import DiskCopies, disk_cache
from weft.memory.tiers.empty import empty_tier
from weft.memory.tiers.link import LowerTier, TierLink
from weft.memory.tiers.saves import Saves
from weft.memory.tiers.tiers import Tiers

SIZES = {Kind.PAGE: 100, Kind.STATE: 400}


class CountedSizes(dict[Kind, int]):
    reads = 0

    def __getitem__(self, kind: Kind) -> int:
        self.reads += 1
        return super().__getitem__(kind)


def test_the_bytes_left_are_those_of_the_units_that_are_held_whatever_fails() -> None:
    for seed in range(30):
        random, arena = Random(seed), Arena(SIZES, 40_000, remember_freed=True)
        erasing = Erasing(arena)
        taken = [(kind, arena.take(kind)) for kind in random.choices([*SIZES], k=40)]
        units = [(kind, unit) for kind, unit in taken if unit is not None]
        erasing.resume(units[:5])
        rest = units[5:]
        while rest or erasing.busy:
            if rest and random.random() < 0.5:
                with erasing.taking_freed():
                    for _ in range(min(len(rest), random.randint(1, 9))):
                        arena.release(*rest.pop())
            part = erasing.next_part(random.choice([1, 300, 10_000]))
            assert erasing.left_bytes == sum(SIZES[kind] for kind, _ in erasing.held())
            if part is not None and random.random() < 0.3:
                erasing.give_up(part)
                erasing.retry()
            elif part is not None:
                erasing.landed(part)
            assert erasing.left_bytes == sum(SIZES[kind] for kind, _ in erasing.held())
        assert erasing.left_bytes == 0


def test_a_scrape_of_metrics_does_not_look_at_every_unit_that_is_being_erased() -> None:
    arena = Arena(SIZES, 400_000, remember_freed=True)
    units = [arena.take(Kind.PAGE) for _ in range(1000)]
    erasing = Erasing(arena)
    with erasing.taking_freed():
        for unit in units:
            assert unit is not None
            arena.release(Kind.PAGE, unit)
    part = erasing.next_part(1)
    assert part is not None
    erasing.landed(part)
    arena.unit_bytes = sizes = CountedSizes(SIZES)
    assert erasing.left_bytes == 100_000
    assert sizes.reads == 0


def test_a_plan_marks_a_bounded_number_of_units_and_all_are_marked_before_any_is_overwritten(monkeypatch) -> None:
    monkeypatch.setattr(erasing_module, "MOST_MARKED", 64)
    arena = Arena(SIZES, 400_000, remember_freed=True)
    units = [arena.take(Kind.PAGE) for _ in range(1000)]
    erasing = Erasing(arena)
    with erasing.taking_freed():
        for unit in units:
            assert unit is not None
            arena.release(Kind.PAGE, unit)
    assert erasing.left_bytes == 100_000
    arena.unit_bytes = sizes = CountedSizes(SIZES)
    marked = 0
    while marked < 1000:
        sizes.reads = 0
        part = erasing.next_part(10_000)
        assert part is not None
        assert not part.erased
        assert 0 < len(part.doomed) <= 64
        marked += len(part.doomed)
        erasing.landed(part)
        assert erasing.left_bytes == 100_000
        assert sizes.reads <= 64
    part = erasing.next_part(10_000)
    assert part is not None
    assert len(part.erased) == 100


def dropping(lengths: list[int]) -> tuple[Copier, TierLink, FlakyBlocks]:
    """Return tiers over a file of two tenants, of which the first is dropped: nothing of that is planned yet."""
    file, _ = filled(lengths)
    cache, upper = disk_cache(SPEC, file, "value"), empty_tier(SPEC, 1 << 20, "value")
    tenancy = Tenancy(lambda: [cache.trie])
    restoring = Restoring(cache, file, tenancy)
    tiers = Tiers(upper, [LowerTier("disk", cache, labelled=True, restoring=restoring)], tenancy)
    with tiers.erasing_freed():
        rows = restoring.rows_to_drop(TENANTS[0])
        while not rows.ended:
            rows.drop_some(100)
    assert isinstance(file._blocks, FlakyBlocks)
    payload = memoryview(bytearray(file.layout.unit_bytes[Kind.PAGE]))
    copies = DiskCopies(file, lambda kind, unit: payload)
    return Copier(tiers, copies, closing_seconds=0.0), tiers.links[0], file._blocks


@pytest.mark.parametrize("planned", [0, 1, 5])
def test_a_process_that_ends_marks_all_units_of_a_drop_and_the_next_one_finds_none(planned: int, monkeypatch) -> None:
    monkeypatch.setattr(erasing_module, "MOST_MARKED", 64)
    copier, link, blocks = dropping([1000, 3])
    for plan in islice(copier.tiers.plan_saves(), planned):
        copier._begin(plan)
    copier.close()
    copier._copies.close()
    blocks.lose_power(Random(1))
    found = DiskFile(blocks, link.restoring.file.layout)
    assert [bytes(row["tenant"]) for row in found.rows] == [TENANTS[1]] * 3
    assert len(found.doomed) == 1000


def test_marks_are_planned_before_paths_are_saved_however_much_is_under_way(monkeypatch) -> None:
    monkeypatch.setattr(erasing_module, "MOST_MARKED", 64)
    copier, link, _ = dropping([1000, 3])
    saves, begun = link.saves, []

    def step() -> list[CopyPlan]:
        begun.clear()
        return [plan for _ in range(20) if (plan := saves.plan(lambda: bool(begun.append(1)))) is not None]

    saves.in_flight_bytes = saves.most_bytes
    plans = step()
    assert [len(plan.doomed) for plan in plans] == [64] * erasing_module.MOST_PARTS
    assert not begun
    saves.landed()
    assert [len(plan.doomed) for plan in step()] == [64]
    assert not begun
    saves.in_flight_bytes = 0
    while saves.erasing.marks_waiting:
        saves.landed()
        assert all(plan.doomed for plan in step())
    # From here on, paths are saved again: these marks need only land.
    assert begun
    copier._copies.close()


def lasting(units: int) -> tuple[Saves, list[int]]:
    """Return saves to a file of as many units, each with an owner."""
    cache = empty_tier(SPEC, 1 << 20, "value")
    cache.arena.remembers_freed = True
    saves = Saves(cache, cache, 10_000, 1 << 30, labelled=True)
    taken = [cache.arena.take(Kind.PAGE) for _ in range(units)]
    return saves, [unit for unit in taken if unit is not None]


@pytest.mark.parametrize("under_way", ["marks", "zeros"])
def test_units_that_were_evicted_before_a_drop_are_overwritten_while_another_drop_is_under_way(under_way: str) -> None:
    saves, units = lasting(6)
    arena, other = saves.lower.arena, units.pop()
    with saves.erasing.taking_freed():
        for unit in units:
            arena.release(Kind.PAGE, unit)
    assert saves.plan(lambda: False) is not None
    if under_way == "zeros":
        saves.landed()
        assert saves.plan(lambda: False).erased
    arena.release(Kind.PAGE, other)
    with saves.erasing.taking_freed():
        pass
    saves.forget()
    plan, page = saves.plan(lambda: False), (Kind.PAGE.value, other)
    assert plan is not None
    # A header that is cleared without zeros would be forgotten with its bytes; one that is not marked, found again.
    assert (plan.cleared, plan.doomed, plan.erased) == ((page,), (page,), (page,))
    assert saves.erasing.busy


def test_units_that_were_evicted_before_a_drop_are_overwritten_by_the_next_plan_if_the_first_has_failed() -> None:
    saves, (unit, *_) = lasting(2)
    saves.lower.arena.release(Kind.PAGE, unit)
    with saves.erasing.taking_freed():
        pass
    plan = saves.plan(lambda: False)
    assert plan is not None
    saves.failed(plan)
    assert saves.erasing.failed
    assert not saves.erasing.busy
    # Whatever is saved next clears the header, so that the next drop would not find it.
    saves.forget()
    again = saves.plan(lambda: False)
    assert again is not None
    assert again.erased == again.doomed == again.cleared == ((Kind.PAGE.value, unit),)
    assert saves.erasing.busy
    saves.landed()
    assert not saves.erasing.busy
