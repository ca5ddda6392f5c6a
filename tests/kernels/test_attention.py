"""Paged attention equals a dense one over each row's own positions, whatever else pages and batches hold."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.support.kernels.operations import CPU, PLAIN, attention
from tests.support.kernels.plans import Row, make_plan
from weft.device.store import AttentionView
from weft.kernels.cpu import paged_reads
from weft.kernels.cpu.index_building import indices
from weft.kernels.cpu.paged_reads import PaddedRead, Read, RowRead, SharedRead, plan_reads
from weft.kernels.interface import Batch, Operations
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.runner.batching import build_batch

CELL, KV_HEADS, GROUP, HEAD_DIM = 64, 2, 3, 16
SCALE = 0.3


@dataclass
class Scene:
    """Rows [start, end) with everything that their sequences hold, in pages among NaN."""

    rows: list[tuple[int, int]]
    window: int | None
    shared: int = 0  # tokens that all sequences have in common, in the same pages
    extra_columns: int = 0
    dtype: torch.dtype = torch.float32
    operations: Operations = CPU

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(len(self.rows) + self.rows[0][1])

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        self.keys = [random(end, KV_HEADS, HEAD_DIM) for _, end in self.rows]
        self.values = [random(end, KV_HEADS, HEAD_DIM) for _, end in self.rows]
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[: self.shared] = tensors[0][: self.shared]
        self.queries = [random(end - start, KV_HEADS * GROUP, HEAD_DIM) for start, end in self.rows]
        self.sinks = random(KV_HEADS * GROUP)
        self.tables = self._hand_out_pages(generator)
        self.view = self._fill_pages()

    def _hand_out_pages(self, generator: torch.Generator) -> list[list[int]]:
        cells = [-(-end // CELL) for _, end in self.rows]
        self.pages = sum(cells) + 3
        free = torch.randperm(self.pages, generator=generator).tolist()
        tables: list[list[int]] = []
        for count in cells:
            common = tables[0][: self.shared // CELL] if tables else []
            tables.append([*common, *(free.pop() for _ in range(count - len(common)))])
        return tables

    def _fill_pages(self) -> AttentionView:
        """Positions before `start` are there; the rest of the store is NaN."""
        # Strides as in the store: other layers lie between the pages.
        store = torch.full((self.pages, 5, CELL, KV_HEADS, HEAD_DIM), float("nan"), dtype=self.dtype)
        view = AttentionView(store[:, 1], store[:, 2], self.window)
        for (start, _), table, keys, values in zip(self.rows, self.tables, self.keys, self.values):
            first = self.first_cell(start)
            for position in range(first * CELL, start):
                page = table[position // CELL]
                view.keys[page, position % CELL] = keys[position]
                view.values[page, position % CELL] = values[position]
        return view

    def first_cell(self, start: int) -> int:
        return 0 if self.window is None else max(0, start - self.window + 1) // CELL

    def batch(self) -> Batch:
        rows = []
        width = self.extra_columns + max(len(t) - self.first_cell(s) for t, (s, _) in zip(self.tables, self.rows))
        for number, ((start, end), table) in enumerate(zip(self.rows, self.tables)):
            first = self.first_cell(start)
            pages = [*table[first:], *[0] * (width - len(table) + first)]
            kind = {"pages": pages} if self.window is None else {"window_pages": pages, "window_first": first}
            rows.append(Row(start, end, 0, seat=number, **kind))
        spec = MemorySpec((AttentionMemory(KV_HEADS, HEAD_DIM, "float32", self.window),), cell=CELL)
        return build_batch(make_plan(rows), spec, torch.zeros(99, dtype=torch.int64), "cpu", self.operations)

    def reads(self) -> list[Read]:
        batch = self.batch()
        return plan_reads(batch.host.rows, indices(batch).paging(self.window), self.window, CELL)

    def paged(self, softcap: float | None = None, sinks: bool = False) -> Tensor:
        new = [slice(start, end) for start, end in self.rows]
        keys = torch.cat([keys[part] for keys, part in zip(self.keys, new)])
        values = torch.cat([values[part] for values, part in zip(self.values, new)])
        sink = self.sinks if sinks else None
        return attention(torch.cat(self.queries), keys, values, self.batch(), self.view, SCALE, softcap, sink)

    def dense(self, softcap: float | None = None, sinks: bool = False) -> Tensor:
        """Query by query, head by head, in float64."""
        out = []
        for (start, end), queries, keys, values in zip(self.rows, self.queries, self.keys, self.values):
            for position in range(start, end):
                low = 0 if self.window is None else max(0, position - self.window + 1)
                seen_keys = keys[low : position + 1].double().repeat_interleave(GROUP, 1)
                seen_values = values[low : position + 1].double().repeat_interleave(GROUP, 1)
                scores = torch.einsum("hd,khd->hk", queries[position - start].double(), seen_keys) * SCALE
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks:
                    scores = torch.cat((scores, self.sinks.double().unsqueeze(1)), 1)
                weights = scores.softmax(-1)[:, : len(seen_keys)]
                out.append(torch.einsum("hk,khd->hd", weights, seen_values))
        return torch.stack(out)


def assert_equal(scene: Scene, tolerance: float = 1e-5, **options: object) -> None:
    ours, reference = scene.paged(**options), scene.dense(**options)
    assert torch.isfinite(ours).all()
    assert float((ours - reference).abs().max()) < tolerance


MIXES = {
    "one decode": [(100, 101)],
    "first token ever": [(0, 1)],
    "one prompt": [(0, 130)],
    "a prompt that goes on": [(70, 200)],
    "decodes of many lengths": [(0, 1), (63, 64), (64, 65), (200, 201), (5, 6)],
    "decodes and prompts": [(199, 200), (64, 65), (0, 65), (127, 190), (10, 12)],
}
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "softcap and sinks": {"softcap": 2.0, "sinks": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("window", [None, 1, 17, 64, 70, 100, 1000])
@pytest.mark.parametrize("mix", MIXES)
def test_paged_attention_equals_a_dense_one(mix, window, options):
    assert_equal(Scene(MIXES[mix], window), **OPTIONS[options])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("window", [None, 1, 17, 100])
def test_the_plain_definition_equals_a_dense_one(window, options):
    assert_equal(Scene(MIXES["decodes and prompts"], window, operations=PLAIN), **OPTIONS[options])


@pytest.mark.parametrize("window", [None, 8, 70])
@pytest.mark.parametrize("options", OPTIONS)
def test_blocks_of_queries_change_nothing(monkeypatch, window, options):
    monkeypatch.setattr(paged_reads, "QUERY_BLOCK", 17)
    assert_equal(Scene([(30, 31), (0, 100), (90, 170)], window), **OPTIONS[options])


@pytest.mark.parametrize("padded_tokens", [0, 100, 1000])
@pytest.mark.parametrize("window", [None, 20, 150])
def test_decodes_side_by_side_equal_decodes_one_by_one(monkeypatch, padded_tokens, window):
    monkeypatch.setattr(paged_reads, "PADDED_TOKENS", padded_tokens)
    assert_equal(Scene([(150, 151), (3, 4), (64, 65), (190, 191)], window, extra_columns=2))


@pytest.mark.parametrize("padded_tokens", [0, 512])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_common_beginning_read_once_equals_reading_it_for_each(monkeypatch, padded_tokens, options):
    monkeypatch.setattr(paged_reads, "PADDED_TOKENS", padded_tokens)
    monkeypatch.setattr(paged_reads, "SHARING_PAGES", 1)
    scene = Scene([(150, 151), (128, 129), (200, 201), (170, 210)], None, shared=128)
    reads = scene.reads()
    assert [type(read) for read in reads] == [SharedRead, RowRead]
    assert len(reads[0].pages) == 2
    assert_equal(scene, **OPTIONS[options])


def test_rows_share_only_what_they_begin_with(monkeypatch):
    monkeypatch.setattr(paged_reads, "SHARING_PAGES", 1)
    scene = Scene([(150, 151), (140, 141), (90, 91), (100, 101)], None, shared=64)
    # The third row has pages of its own instead.
    scene.tables[2][0] = next(p for p in range(scene.pages) if all(p not in table for table in scene.tables))
    scene.keys[2][:64] += 1
    scene.view = scene._fill_pages()
    reads = scene.reads()
    assert [type(read) for read in reads] == [SharedRead, RowRead]
    assert reads[0].tokens.tolist() == [0, 1, 3]
    assert_equal(scene)


def test_the_open_cell_is_never_read_as_a_common_beginning(monkeypatch):
    monkeypatch.setattr(paged_reads, "SHARING_PAGES", 1)
    scene = Scene([(64, 65), (127, 128)], None, shared=64)
    scene.tables[1] = scene.tables[0]
    reads = scene.reads()
    assert len(reads[0].pages) == 1


@pytest.mark.parametrize("window", [None, 70])
def test_what_else_is_in_the_batch_changes_nothing(window):
    rows = [(199, 200), (64, 65), (0, 65), (127, 190)]
    together = Scene(rows, window)
    parts = together.paged().split([end - start for start, end in rows])
    for row, part in enumerate(parts):
        alone = Scene(rows, window)
        for name in ("rows", "keys", "values", "queries", "tables"):
            setattr(alone, name, getattr(alone, name)[row : row + 1])
        torch.testing.assert_close(alone.paged(), part, rtol=0, atol=1e-6)


def test_masks_and_reads_stay_bounded_by_the_window():
    scene = Scene([(0, 3000)], 100)
    reads = scene.reads()
    assert len(reads) == 6
    for read in reads:
        queries = read.tokens.stop - read.tokens.start
        assert read.mask.dtype == torch.bool
        assert read.mask.numel() <= queries * (queries + 100)
        assert len(read.pages) <= -(-(queries + 100) // CELL) + 1
    assert [a.tokens.stop == b.tokens.start for a, b in pairwise(reads)] == [True] * 5


def test_decodes_read_only_their_windows_pages():
    scene = Scene([(1000, 1001), (1500, 1501)], 100)
    [read] = scene.reads()
    assert isinstance(read, PaddedRead)
    assert len(read.pages) == 2 * 3


def test_bfloat16_stays_near_the_dense_reference():
    assert_equal(Scene(MIXES["decodes and prompts"], 70, dtype=torch.bfloat16), tolerance=0.05, sinks=True)


def test_new_keys_and_values_are_in_their_pages():
    scene = Scene([(60, 70)], None)
    scene.paged()
    for position in range(70):
        page = scene.tables[0][position // CELL]
        torch.testing.assert_close(scene.view.keys[page, position % CELL], scene.keys[0][position])
        torch.testing.assert_close(scene.view.values[page, position % CELL], scene.values[0][position])
