"""The arena: units never overlap, slabs come back, owners are counted."""

from __future__ import annotations

from itertools import pairwise
from time import thread_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.base.errors import OptionError
from weft.memory.arena import Arena, choose_slab_bytes, units_in_slab
from weft.memory.kinds import Kind

sizes = st.dictionaries(st.sampled_from(list(Kind)), st.integers(1, 40).map(lambda n: 64 * n), min_size=1)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    sizes=sizes, slabs=st.integers(8, 60), moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=120)
)
def test_live_units_never_overlap_and_everything_comes_back(sizes, slabs, moves) -> None:
    budget = slabs * max(sizes.values())
    try:
        arena = Arena(sizes, budget)
    except OptionError:
        assert slabs < 2 * len(sizes)
        return
    kinds, live = list(sizes), []
    for which, choice in moves:
        kind = kinds[which % len(kinds)]
        if choice < 6 or not live:
            unit = arena.take(kind)
            if unit is not None:
                live.append((kind, unit))
        else:
            arena.release(*live.pop(choice % len(live)))
        spans = sorted((unit * sizes[kind], (unit + 1) * sizes[kind]) for kind, unit in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert not spans or spans[-1][1] <= budget
    for kind, unit in live:
        arena.release(kind, unit)
    assert arena.used_slabs == 0


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(sizes=sizes, budget=st.integers(1 << 12, 1 << 20))
def test_every_slab_has_room_for_every_kind(sizes, budget) -> None:
    slab = choose_slab_bytes(sizes, budget)
    for size in sizes.values():
        assert all(len(units_in_slab(i, slab, size)) >= 1 for i in range(50))


def test_all_memory_can_go_to_any_one_kind() -> None:
    """No ratio between kinds is set: whatever is asked for gets everything."""
    sizes = {Kind.PAGE: 128, Kind.STATE: 1024, Kind.TAIL: 256}
    for kind, size in sizes.items():
        arena = Arena(sizes, 1 << 16)
        taken = 0
        while arena.take(kind) is not None:
            taken += 1
        assert taken * size >= 0.9 * (1 << 16)


def test_a_shared_unit_is_freed_by_its_last_owner() -> None:
    arena = Arena({Kind.STATE: 64}, 640)
    unit = arena.take(Kind.STATE)
    arena.share(Kind.STATE, unit)
    arena.release(Kind.STATE, unit)
    assert arena.used(Kind.STATE) == 1
    arena.release(Kind.STATE, unit)
    assert arena.used(Kind.STATE) == 0
    with pytest.raises(KeyError):
        arena.release(Kind.STATE, unit)


def test_memory_too_small_for_the_model_is_an_error_with_the_numbers() -> None:
    with pytest.raises(OptionError, match="at least 2048"):
        Arena({Kind.PAGE: 1024, Kind.STATE: 1024}, 1500)


def test_a_claimed_unit_is_taken_once_and_only_where_it_can_lie() -> None:
    arena = Arena({Kind.PAGE: 64, Kind.STATE: 192}, 10_000)
    per_slab = arena.slab_bytes // 64
    beyond = arena.slabs * per_slab
    assert arena.claim_all(Kind.PAGE, [1, 1, beyond]) == {1}
    # The first state would lie in a slab that holds pages.
    assert arena.claim_all(Kind.STATE, [0, arena.slab_bytes // 192]) == {arena.slab_bytes // 192}
    assert arena.used_slabs == 2
    taken = [arena.take(Kind.PAGE) for _ in range(per_slab - 1)]
    assert 1 not in taken
    for page in [1, *taken]:
        arena.release(Kind.PAGE, page)
    arena.release(Kind.STATE, arena.slab_bytes // 192)
    assert arena.used_slabs == 0


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    size=st.integers(1, 4).map(lambda n: 64 * n),
    claims=st.lists(st.tuples(st.sampled_from([Kind.PAGE, Kind.STATE]), st.lists(st.integers(0, 70))), max_size=3),
)
def test_claims_take_the_units_that_lie_in_slabs_without_others(size, claims) -> None:
    arena = Arena({Kind.PAGE: size, Kind.STATE: 192}, 64 * 192)
    held: dict[int, Kind] = {}
    for kind, units in claims:
        unit_bytes = arena.unit_bytes[kind]
        lies = {each: slab for slab in range(arena.slabs) for each in units_in_slab(slab, arena.slab_bytes, unit_bytes)}
        wanted = {unit for unit in units if unit in lies and lies[unit] not in held}
        assert arena.claim_all(kind, units) == wanted
        held |= {lies[unit]: kind for unit in wanted}
        assert arena.used_slabs == len(held)
    for slab, kind in held.items():
        # What is left of its slabs can be taken, and everything comes back.
        own = set(units_in_slab(slab, arena.slab_bytes, arena.unit_bytes[kind]))
        assert len([unit for unit in own if unit in arena.owners[kind]]) == arena._live[slab]
    for kind, owners in arena.owners.items():
        for unit in list(owners):
            arena.release(kind, unit)
    assert arena.used_slabs == 0


def test_claiming_a_full_file_takes_time_in_proportion_to_its_slabs() -> None:
    """Quadratic work takes a hundred times as long for one file as for a hundred files of a hundredth of its size."""

    def seconds(arenas: int, slabs: int) -> float:
        began = thread_time()
        for _ in range(arenas):
            arena = Arena({Kind.PAGE: 4096}, 4096 * slabs)
            assert len(arena.claim_all(Kind.PAGE, range(slabs - 1, -1, -1))) == slabs
            assert arena.used_slabs == arena.slabs
        return thread_time() - began

    # Quadratic work is seen in every attempt, a processor that others slow down in one.
    assert any(seconds(1, 20_000) < 10 * seconds(100, 200) for _ in range(5))


def test_a_claimed_slab_is_not_taken_again() -> None:
    arena = Arena({Kind.PAGE: 64, Kind.STATE: 192}, 192 * 64)
    assert arena.claim_all(Kind.STATE, [0]) == {0}
    units = []
    while (unit := arena.take(Kind.PAGE)) is not None:
        units.append(unit)
    assert min(units) * 64 >= arena.slab_bytes
    assert arena.used_slabs == arena.slabs
    for unit in units:
        arena.release(Kind.PAGE, unit)
    arena.release(Kind.STATE, 0)
    assert arena.used_slabs == 0
    again = []
    while (unit := arena.take(Kind.PAGE)) is not None:
        again.append(unit)
    assert len(again) == len(set(again)) > len(units)
