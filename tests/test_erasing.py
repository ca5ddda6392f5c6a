"""What is left to be overwritten is known at any time, and without looking at every unit."""

from __future__ import annotations

from random import Random

from weft.memory.arena import Arena
from weft.memory.kinds import Kind
from weft.memory.tiers import erasing as erasing_module
from weft.memory.tiers.erasing import Erasing

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
