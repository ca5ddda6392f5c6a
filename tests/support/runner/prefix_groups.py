"""Random decodes that begin with the same pages, and the groups that they make."""

from __future__ import annotations

import random

import numpy as np

from tests.support.kernels.plans import Row, make_plan
from weft.runner.cuda.shared_prefixes import PrefixGroups, PrefixSharing


def check_groups(groups: PrefixGroups, table: np.ndarray, whole: np.ndarray, members: int) -> None:
    """Members have the pages of their group, all of them complete; every row is in one group at most."""
    assert len(set(groups.order.tolist())) == len(groups.order)
    assert (groups.shared <= whole).all()
    assert set(np.flatnonzero(groups.shared)) == set(groups.order.tolist())
    saved = 0
    for group, cells in enumerate(groups.cells):
        rows = groups.order[groups.first[group] : groups.first[group + 1]]
        assert 1 <= len(rows) <= members
        assert cells > 0
        assert (groups.shared[rows] == cells).all()
        assert (table[rows, :cells] == table[rows[0], :cells]).all()
        saved += (len(rows) - 1) * int(cells)
    assert saved == groups.saved


def random_paths(rng: random.Random, rows: int) -> list[list[int]]:
    """Pages of rows: prefixes of some depth, nested at times, and then pages of their own."""
    fresh = iter(rng.sample(range(10_000), 9_999))
    prefixes: list[list[int]] = [[]]
    for _ in range(rng.randint(1, 6)):
        base = rng.choice(prefixes)
        prefixes.append([*base[: rng.randint(0, len(base))], *(next(fresh) for _ in range(rng.randint(1, 5)))])
    paths = []
    for _ in range(rows):
        prefix = rng.choice(prefixes)
        own = [next(fresh) for _ in range(rng.randint(1, 3))]
        paths.append([*prefix[: rng.choice([0, len(prefix), len(prefix)])], *own])
    return paths


CELL = 8


def plan_of(paths: list[list[int]], seats: list[int] | None = None, after: int = 3):
    """Decodes whose last cells are open, `after` tokens in them."""
    seats = seats or list(range(len(paths)))
    starts = [(len(path) - 1) * CELL + after for path in paths]
    return make_plan([Row(start, start + 1, pages=path, seat=s) for start, path, s in zip(starts, paths, seats)])


def known_paths() -> list[list[int]]:
    return [[1, 2, 3, 10], [1, 2, 3, 11], [4, 5, 12], [1, 2, 3, 13], [4, 5, 14, 15]]


def check_reused_seats() -> None:
    """Another sequence takes a seat, with pages that were another's, as far along as the one before it."""
    sharing = PrefixSharing(CELL, 16)
    first = sharing.of(plan_of(known_paths()))
    assert first is not None
    assert sharing.of(plan_of(known_paths(), after=4)) is first
    paths = known_paths()
    paths[1] = [1, 2, 9, 11]
    plan = plan_of(paths, after=5)
    groups = sharing.of(plan)
    assert groups is not None
    check_groups(groups, plan.page_table, plan.start // CELL, 16)
