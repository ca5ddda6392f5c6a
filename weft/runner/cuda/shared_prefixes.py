"""Groups of decodes that begin with the same pages, found from a plan's page table.

Rows that share pages form a trie. At each of its nodes the rows are either one group, which reads the pages of the node
once, or grouped further down: whichever saves more cells. A row is in one group at most, so pages shared by several
groups are read by each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.base.plan import Ints, Plan
from weft.kernels.interface import Operations
from weft.models.model import CausalModel

# Sharing adds two kernels to every layer, an estimated 8 us. A cell of 128 KiB is read in 0.03 us on an H200, so this
# number is twice the cost. The part of all cells must be worth the padding: fewer sizes are recorded than without.
LEAST_SAVED_CELLS = 512
LEAST_SAVED_PART = 0.25
# Steps with shared prefixes are recorded for multiples of this number of rows, or of a multiple: at most a few.
ROWS_APART = 32
MOST_SIZES = 8
# In place of a page that cannot be shared.
NO_PAGE = -1


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """Rows that read a prefix together. A group of more rows than can do so is listed several times."""

    order: Ints  # [members] rows, group by group
    first: Ints  # [groups + 1] where a group's members begin in `order`
    cells: Ints  # [groups] that its members share
    bounds: Ints  # [groups + 1] sums of these cells
    shared: Ints  # [rows] cells that a row shares, 0 without a group
    saved: int  # cells


def shared_sizes(most: int) -> list[int]:
    """Return the numbers of decodes to record with shared prefixes.

    >>> shared_sizes(8), shared_sizes(100), shared_sizes(1000)[:2]
    ([8], [32, 64, 96, 100], [128, 256])
    """
    apart = ROWS_APART * -(-most // (ROWS_APART * MOST_SIZES))
    return [*range(apart, most, apart), most]


def members_of(model: CausalModel, operations: Operations) -> int:
    """Return how many decodes of a model read a shared prefix together: in every layer that reads whole prefixes."""
    found = [mixer.prefix_members(operations) for mixer in model.mixers()]
    return min((members for members in found if members is not None), default=1)


class PrefixSharing:
    """Finds the groups of each plan, and keeps them as long as they hold: most steps have the rows of the last one."""

    def __init__(self, cell: int, members: int) -> None:
        self.cell, self.members = cell, members
        self._groups: PrefixGroups | None = None
        # Of the plan searched last. Pages count where `_needed`: a seat, and a page of another cell, may be reused.
        self._pages, self._needed = np.zeros((0, 0), np.int32), np.zeros((0, 0), np.bool_)
        self._start = np.zeros(0, np.int32)

    def of(self, plan: Plan) -> PrefixGroups | None:
        """Return the groups of a plan of decodes; None if they do not save enough."""
        # About as many as the rows have.
        cells = int(plan.start.sum()) // self.cell + plan.rows
        if cells < LEAST_SAVED_CELLS:
            return None
        if not self.hold(plan):
            self._search(plan)
        self._start = plan.start
        saved = 0 if self._groups is None else self._groups.saved
        return self._groups if saved >= max(LEAST_SAVED_CELLS, cells * LEAST_SAVED_PART) else None

    def hold(self, plan: Plan) -> bool:
        """Return whether the groups of the last plan are right for this one, too, and likely still the best.

        Their cells stay complete as long as no row is moved back. A jump is another sequence, which may share more.
        """
        width = self._pages.shape[1]
        if len(self._start) != plan.rows or plan.page_table.shape[1] < width:
            return False
        # A negative number is a large one here.
        if ((plan.start - self._start).view(np.uint32) > self.cell).any():
            return False
        return not ((plan.page_table[:, :width] != self._pages) & self._needed).any()

    def _search(self, plan: Plan) -> None:
        self._groups = find_groups(plan.page_table, plan.start // self.cell, self.members)
        shared = np.zeros(plan.rows, np.int32) if self._groups is None else self._groups.shared
        width = max(1, int(shared.max()))
        self._pages = plan.page_table[:, :width]
        # The first page of a row without a group, too: it may be that of another sequence now.
        self._needed = np.arange(width) < np.maximum(shared, 1)[:, None]


def find_groups(page_table: Ints, whole: Ints, members: int) -> PrefixGroups | None:
    """Return the groups that save the most cells; None if no two rows begin with the same page.

    The first `whole` cells of a row can be shared: it writes none of them.
    """
    candidates = rows_with_company(page_table, whole)
    if not len(candidates):
        return None
    whole = whole[candidates]
    width = int(whole.max())
    pages = np.where(np.arange(width) < whole[:, None], page_table[candidates, :width], NO_PAGE)
    pages = np.ascontiguousarray(pages, np.int32)
    # As bytes: any order will do in which equal beginnings are neighbours.
    order = pages.view(f"V{4 * width}").ravel().argsort()
    pages, whole = pages[order], whole[order]
    differs = pages[1:] != pages[:-1]
    common = np.where(differs.any(1), differs.argmax(1), width)
    common = np.minimum(common, np.minimum(whole[1:], whole[:-1]))
    saved, chosen = choose_groups(common.tolist(), members)
    rows = candidates[order].astype(np.int32)
    cut = [(at, min(at + members, end), cells) for begin, end, cells in chosen for at in range(begin, end, members)]
    shared = np.zeros(len(page_table), np.int32)
    for begin, end, cells in chosen:
        shared[rows[begin:end]] = cells
    return PrefixGroups(
        order=np.concatenate([rows[begin:end] for begin, end, _ in cut]),
        first=np.cumsum([0, *(end - begin for begin, end, _ in cut)], dtype=np.int32),
        cells=np.array([cells for _, _, cells in cut], np.int32),
        bounds=np.cumsum([0, *(cells for _, _, cells in cut)], dtype=np.int32),
        shared=shared,
        saved=saved,
    )


def rows_with_company(page_table: Ints, whole: Ints) -> NDArray[np.int64]:
    """Return the rows whose first cell is complete and another's, too."""
    complete = np.flatnonzero(whole > 0)
    if len(complete) < 2:
        return complete[:0]
    _, which, counts = np.unique(page_table[complete, 0], return_inverse=True, return_counts=True)
    return complete[counts[which] > 1]


@dataclass(slots=True)
class TrieRun:
    """A run of rows with at least `cells` common cells, and the best groups among those runs of it that have more."""

    cells: int
    begin: int
    saved: int
    groups: list[tuple[int, int, int]]


def choose_groups(common: list[int], members: int) -> tuple[int, list[tuple[int, int, int]]]:
    """Return how many cells the best groups save, and the groups: begin, end and cells, in the order of rows.

    `common` has the number of cells that each row shares with the next.

    >>> choose_groups([2, 9, 9, 0, 1], 16)
    (19, [(1, 4, 9), (4, 6, 1)])
    """
    # Open nodes, each inside the one before it. All rows are a node without cells.
    open_nodes = [TrieRun(0, 0, 0, [])]
    for last, cells in enumerate([*common, 0]):
        begin, saved, groups = last, 0, list[tuple[int, int, int]]()
        while open_nodes[-1].cells > cells:
            node = open_nodes.pop()
            begin, saved, groups = node.begin, node.saved + saved, node.groups + groups
            rows = last + 1 - begin
            together = (rows - -(-rows // members)) * node.cells
            if together >= saved:
                saved, groups = together, [(begin, last + 1, node.cells)]
        if open_nodes[-1].cells == cells:
            open_nodes[-1].saved += saved
            open_nodes[-1].groups += groups
        else:
            open_nodes.append(TrieRun(cells, begin, saved, groups))
    return open_nodes[0].saved, open_nodes[0].groups
