"""Decodes are grouped by the pages that they begin with, as the definition groups them, and for as long as it holds."""

from __future__ import annotations

import random
from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.runner.prefix_groups import (
    CELL,
    check_groups,
    check_reused_seats,
    known_paths,
    plan_of,
    random_paths,
)
from weft.runner.cuda import shared_prefixes
from weft.runner.cuda.shared_prefixes import PrefixSharing, find_groups, shared_sizes

# groups ---------------------------------------------------------------------------------------------------------------


def best_saving(paths: list[tuple[int, ...]], members: int) -> int:
    """Cells that are saved if the rows of every node of the trie are one group, or grouped below, whatever is better.

    This is the definition: split the rows by their first page, then by their second, and so on, without sorting.
    """
    if len(paths) < 2:
        return 0
    common = next((i for i, pages in enumerate(zip(*paths)) if len(set(pages)) > 1), min(map(len, paths)))
    below: dict[int, list[tuple[int, ...]]] = {}
    for path in paths:
        if len(path) > common:
            below.setdefault(path[common], []).append(path)
    together = (len(paths) - ceil(len(paths) / members)) * common
    return max(together, sum(best_saving(each, members) for each in below.values()))


@st.composite
def tables(draw) -> tuple[np.ndarray, np.ndarray]:
    """Pages of rows, and how many cells of each are complete. Pages are few, so that beginnings are often equal."""
    rows, width = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    pages = st.lists(st.integers(0, draw(st.integers(0, 3))), min_size=width, max_size=width)
    table = draw(st.lists(pages, min_size=rows, max_size=rows))
    whole = draw(st.lists(st.integers(0, width - 1), min_size=rows, max_size=rows))
    return np.array(table, np.int32), np.array(whole, np.int32)


@given(tables(), st.sampled_from([2, 3, 16]))
def test_groups_hold_and_save_as_much_as_the_definition(drawn, members):
    table, whole = drawn
    groups = find_groups(table, whole, members)
    paths = [tuple(line[:count]) for line, count in zip(table.tolist(), whole.tolist()) if count]
    assert (0 if groups is None else groups.saved) == best_saving(paths, members)
    if groups is not None:
        check_groups(groups, table, whole, members)


@pytest.mark.parametrize("seed", range(20))
def test_groups_of_many_rows_hold(seed):
    paths = random_paths(random.Random(seed), 200)
    whole = np.array([len(path) - 1 for path in paths], np.int32)
    table = np.array([[*path, *[7] * (40 - len(path))] for path in paths], np.int32)
    groups = find_groups(table, whole, 16)
    assert groups is not None
    check_groups(groups, table, whole, 16)
    complete = [tuple(path[:-1]) for path in paths if len(path) > 1]
    assert groups.saved == best_saving(complete, 16)


@pytest.mark.parametrize("most", [1, 8, 32, 33, 100, 256, 300, 1000])
def test_few_sizes_hold_any_number_of_rows(most):
    sizes = shared_sizes(most)
    assert len(sizes) <= 8
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most


# the groups of the last plan ------------------------------------------------------------------------------------------


@pytest.fixture
def _few_cells_pay(monkeypatch):
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED_CELLS", 4)


@pytest.mark.usefixtures("_few_cells_pay")
def test_groups_are_kept_until_a_page_changes_wherever_its_row_sits():
    check_reused_seats()


@pytest.mark.usefixtures("_few_cells_pay")
def test_groups_are_searched_again_when_rows_come_go_or_fall_back():
    sharing = PrefixSharing(CELL, 16)
    assert sharing.of(plan_of(known_paths())) is not None
    more = [*known_paths(), [1, 2, 3, 20]]
    assert len(sharing.of(plan_of(more)).order) == 6
    assert len(sharing.of(plan_of(known_paths()[:4])).order) == 3
    # A row that writes into a cell of its group, after it was moved back.
    plan = plan_of(known_paths())
    assert sharing.of(plan) is not None
    start = plan.start.copy()
    start[0] = 2 * CELL + 1
    moved = replace(plan, start=start, end=start + 1)
    check_groups(sharing.of(moved), moved.page_table, moved.start // CELL, 16)


@pytest.mark.parametrize(("apart", "pays"), [(0, True), (60, False)])
def test_prefixes_are_shared_only_if_that_saves_enough(apart, pays):
    prefix = list(range(40))
    paths = [[*prefix, 100 + row] for row in range(16)]
    # Rows without company, each as long as 40 cells.
    paths += [list(range(1000 * (row + 1), 1000 * (row + 1) + 41)) for row in range(apart)]
    groups = PrefixSharing(CELL, 16).of(plan_of(paths))
    assert (groups is not None) == pays
    assert PrefixSharing(CELL, 16).of(plan_of(paths[:2])) is None, "40 cells are not worth two kernels"
