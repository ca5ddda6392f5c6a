"""Decodes that begin with the same pages read them once per group, and find what they would find on their own.

Without a GPU, Triton's interpreter runs the kernels at small odd sizes; what is marked `gpu` runs at real ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from tests.compiled import assert_compiles
from tests.engines import TINY, Ask, dummy_model, greedy, serve, tokens
from tests.operations import GPU_ROWS, PLAIN
from tests.plans import Row, make_plan
from tests.test_cuda_runner import FEW_LAYERS, SHORT_CELL, cpu_engine, cuda_engine
from weft.kernels.attention import AttentionForm
from weft.kernels.cuda.attention import read_pages
from weft.kernels.cuda.attention_decode import DecodeSharing, attend_decodes
from weft.kernels.cuda.attention_shared import attend_shared, prefix_members
from weft.kernels.interface import Batch
from weft.memory.device.store import AttentionView
from weft.memory.kinds import Kind
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.runner.cuda import shared_prefixes
from weft.runner.cuda.inputs import DecodeInputs
from weft.runner.cuda.recorded import RecordedSteps
from weft.runner.cuda.shared_prefixes import PrefixGroups, PrefixSharing, find_groups, members_of, shared_sizes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# groups ---------------------------------------------------------------------------------------------------------------


def best_saving(paths: list[tuple[int, ...]], members: int) -> int:
    """Cells that are saved if the rows of every node of the trie are one group, or grouped below, whatever is better.

    The definition, without sorting: rows are told apart by one page after another.
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
    """Pages of rows, and how many cells of each are complete. Few pages: beginnings are often equal, and pages return."""
    rows, width = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    pages = st.lists(st.integers(0, draw(st.integers(0, 3))), min_size=width, max_size=width)
    table = draw(st.lists(pages, min_size=rows, max_size=rows))
    whole = draw(st.lists(st.integers(0, width - 1), min_size=rows, max_size=rows))
    return np.array(table, np.int32), np.array(whole, np.int32)


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


@pytest.mark.parametrize("most", [1, 8, 32, 33, 100, 256, 300, 1000])
def test_few_sizes_hold_any_number_of_rows(most):
    sizes = shared_sizes(most)
    assert len(sizes) <= 8
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most


# the groups of the last plan ------------------------------------------------------------------------------------------

CELL = 8


def plan_of(paths: list[list[int]], seats: list[int] | None = None, after: int = 3):
    """Decodes whose last cells are open, `after` tokens in them."""
    seats = seats or list(range(len(paths)))
    starts = [(len(path) - 1) * CELL + after for path in paths]
    return make_plan([Row(start, start + 1, pages=path, seat=s) for start, path, s in zip(starts, paths, seats)])


@pytest.fixture
def _few_cells_pay(monkeypatch):
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED_CELLS", 4)


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


# kernels --------------------------------------------------------------------------------------------------------------


@dataclass
class Scene:
    """Decodes over `paths` of pages, the last one open, padded to some rows. What no row may read is NaN."""

    paths: list[list[int]]
    padding: int = 0
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    cell: int = 16
    members: int = 4
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        rng, generator = random.Random(self.seed), torch.Generator(DEVICE).manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE).to(self.dtype)

        real, self.rows = len(self.paths), len(self.paths) + self.padding
        names = sorted({page for path in self.paths for page in path})
        number = dict(zip(names, rng.sample(range(len(names)), len(names))))
        self.tables = [[number[page] for page in path] for path in self.paths]
        self.scratch = len(names)
        self.starts = [(len(path) - 1) * self.cell + rng.randrange(self.cell) for path in self.paths]
        shape = (len(names) + 1, 3, self.cell, self.kv_heads, self.head_dim)
        self.store = torch.full(shape, torch.nan, dtype=self.dtype, device=DEVICE)
        for table, start in zip(self.tables, self.starts):
            for page in table[:-1]:
                self.store[page, :2] = normal(2, *shape[2:])
            self.store[table[-1], :2, : start % self.cell + 1] = normal(2, start % self.cell + 1, *shape[3:])
        self.store[self.scratch, :2, :1] = normal(2, 1, *shape[3:])
        self.q, self.sinks = normal(self.rows, self.heads, self.head_dim), normal(self.heads)
        self.scale = self.head_dim**-0.5
        spec = MemorySpec((AttentionMemory(self.kv_heads, self.head_dim, "float32"),), cell=self.cell)
        width = max(map(len, self.paths))
        self.inputs = DecodeInputs(self.rows, width, spec, {Kind.PAGE: self.scratch}, DEVICE, GPU_ROWS)
        self.plan = make_plan([Row(s, s + 1, pages=table) for s, table in zip(self.starts, self.tables)])
        self.groups = find_groups(self.plan.page_table, self.plan.start // self.cell, self.members)
        assert real <= self.rows

    def batch(self) -> Batch:
        self.inputs.buffer.fill_(1 << 30)
        self.inputs.fill(self.plan, self.rows, groups=self.groups)
        return self.inputs.batch(self.rows, self.inputs.tensor("token", self.rows), self.members)

    def view(self) -> AttentionView:
        return AttentionView(self.store[:, 0], self.store[:, 1], None)

    def reference(self, softcap: float | None, sinks: bool) -> Tensor:
        """Return the definition in float32, row by row."""
        out = []
        tables = [*self.tables, *[[self.scratch]] * self.padding]
        for q, table, start in zip(self.q.float(), tables, [*self.starts, *[0] * self.padding]):
            keys, values = self.store[table, :2].float().transpose(0, 1).flatten(1, 2)[:, : start + 1]
            keys, values = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (keys, values))
            scores = torch.einsum("hd,phd->hp", q, keys) * self.scale
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            if sinks:
                scores = torch.cat([scores, self.sinks.float()[:, None]], 1)
            out.append(torch.einsum("hp,phd->hd", scores.softmax(1)[:, : start + 1], values))
        return torch.stack(out)

    def check(
        self,
        sharing: DecodeSharing | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        tolerance: float = 3e-6,
    ) -> None:
        out = torch.full(self.q.shape, torch.nan, dtype=self.dtype, device=DEVICE)
        sink = self.sinks if sinks else None
        attend_shared(self.q, out, self.batch(), self.view(), self.scale, softcap, sink, sharing)
        wanted = self.reference(softcap, sinks)
        assert torch.isfinite(out).all()
        assert float((out.float() - wanted).norm() / wanted.norm()) < tolerance


def scene_of(seed: int) -> tuple[Scene, dict]:
    """Draw a scene, and the options of its layer."""
    rng = random.Random(seed)
    kv_heads, group = rng.choice([1, 2]), rng.randint(1, 8)
    paths = random_paths(rng, rng.randint(2, 9))
    paths[1] = [*paths[0][:-1], 20_000] if len(paths[0]) > 1 else [*paths[0][:1], 20_000]
    paths[0] = [*paths[1][:-1], 20_001]
    scene = Scene(
        paths, rng.choice([0, 0, 3]), kv_heads * group, kv_heads, rng.choice([16, 24, 32]), rng.choice([16, 32]),
        rng.choice([2, 4, 8]), seed=seed,
    )  # fmt: skip
    options = {
        "sharing": rng.choice([None, DecodeSharing(1, 1), DecodeSharing(5, 1), DecodeSharing(40, 1)]),
        "softcap": rng.choice([None, 2.0]),
        "sinks": rng.random() < 0.5,
    }
    return scene, options


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.gpu) for seed in range(8, 200))])
def test_rows_that_read_prefixes_together_find_what_they_find_alone(seed):
    scene, options = scene_of(seed)
    assert scene.groups is not None
    scene.check(**options)


def test_a_step_without_groups_is_that_of_rows_on_their_own():
    """As in recording, when inputs are those of padding."""
    scene = Scene([[1, 2], [3], [4]])
    scene.inputs.fill_with_padding()
    batch = scene.inputs.batch(3, scene.inputs.tensor("token", 3), 4)
    out = torch.full(scene.q.shape, torch.nan, device=DEVICE)
    attend_shared(scene.q, out, batch, scene.view(), scene.scale, None, None)
    values = scene.store[scene.scratch, 1, 0].repeat_interleave(3, 0)
    torch.testing.assert_close(out, values.expand_as(out))


def test_windowed_layers_ignore_groups():
    scene = Scene([[1, 2, 3], [1, 2, 4]])
    batch, view = scene.batch(), replace(scene.view(), window=20)
    batch = replace(batch, windowed=batch.full)
    out = torch.full_like(scene.q, torch.nan)
    attend_decodes(scene.q, out, replace(batch, shared=None), view, scene.scale, None, None)
    assert read_pages(scene.q, batch, view, scene.scale).equal(out)


def big_group(members: int, head_dim: int = 16, sinks: bool = True) -> None:
    """A group of 40, another with one of its pages, and rows of their own."""
    paths = [[1, 2, 3, 100 + row] for row in range(40)] + [[1, 9, 8, 7, 200 + row] for row in range(3)]
    paths = [*paths[::2], [300], [301, 302], *paths[1::2]]
    Scene(paths, 2, 4, 1, head_dim, members=members).check(sinks=sinks)


def test_groups_larger_than_what_reads_together_are_cut():
    big_group(16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 64), (32, 8, 128), (16, 2, 128), (16, 4, 256), (8, 8, 80)]
)
@pytest.mark.parametrize("sinks", [False, True])
def test_real_sizes_in_bfloat16(heads, kv_heads, head_dim, sinks):
    form = AttentionForm(heads, kv_heads, head_dim, 1.0)
    members = prefix_members(form, torch.bfloat16)
    prefixes = [[1000 * (number + 1) + page for page in range(32)] for number in range(8)]
    paths = [[*prefixes[row % 8], *range(100_000 + 4 * row, 100_000 + 4 * row + 1 + row % 3)] for row in range(126)]
    Scene(paths, 2, heads, kv_heads, head_dim, 64, members, torch.bfloat16).check(sinks=sinks, tolerance=6e-3)


def launch_groups() -> None:
    """At the sizes of published models, as on an H200."""
    for heads, kv_heads, head_dim in ((32, 8, 64), (32, 8, 128), (16, 2, 128), (16, 4, 256), (16, 2, 256)):
        members = prefix_members(AttentionForm(heads, kv_heads, head_dim, 1.0), torch.bfloat16)
        scene = Scene([[1, 2], [1, 3]], 0, heads, kv_heads, head_dim, 64, members, torch.bfloat16)
        sharing = DecodeSharing(264 // kv_heads, 1)
        out = torch.empty_like(scene.q)
        attend_shared(scene.q, out, scene.batch(), scene.view(), scene.scale, None, None, sharing)


def test_kernels_compile_for_sm_90_and_stay_in_registers():
    assert_compiles(launch_groups, in_registers=True)
