"""Rows of paged attention, and the dense attention that they equal."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tests.support.kernels.operations import CPU, attention
from tests.support.kernels.plans import Row, make_plan
from weft.device.store import AttentionView
from weft.kernels.cpu.index_building import indices
from weft.kernels.cpu.paged_reads import Read, plan_reads
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


def check_masks_and_reads_stay_bounded_by_the_window():
    scene = Scene([(0, 3000)], 100)
    reads = scene.reads()
    assert len(reads) == 6
    for read in reads:
        queries = read.tokens.stop - read.tokens.start
        assert read.mask.dtype == torch.bool
        assert read.mask.numel() <= queries * (queries + 100)
        assert len(read.pages) <= -(-(queries + 100) // CELL) + 1
    assert [a.tokens.stop == b.tokens.start for a, b in pairwise(reads)] == [True] * 5
