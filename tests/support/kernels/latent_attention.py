"""Rows of latent attention, and the dense attention that they equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.kernels.operations import CPU
from tests.support.kernels.plans import Row, make_plan
from weft.device.store import AttentionView, Store
from weft.kernels.attention import LatentInputs, LatentWeights
from weft.kernels.interface import Batch, Operations
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.runner.batching import build_batch

SCALE = 0.3


@dataclass
class Scene:
    """Rows [start, end) whose earlier latents are in pages; everything else in the store is NaN."""

    rows: list[tuple[int, int]]
    heads: int = 3
    latent: int = 24
    shared_dim: int = 8
    key_dim: int = 12
    value_dim: int = 10
    cell: int = 16
    common: int = 0  # cells that all sequences share, in the same pages
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    operations: Operations = CPU

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(len(self.rows) + self.rows[0][1])

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self.device).to(self.dtype)

        self.stored = [random(end, self.latent + self.shared_dim) for _, end in self.rows]
        for line in self.stored:
            line[: self.common * self.cell] = self.stored[0][: self.common * self.cell]
        tokens = sum(end - start for start, end in self.rows)
        self.queries = random(tokens, self.heads, self.key_dim + self.shared_dim)
        # As in a checkpoint: a head's rows for keys, then those for values.
        expansion = random(self.heads, self.key_dim + self.value_dim, self.latent) * self.latent**-0.5
        self.weights = LatentWeights(*expansion.split([self.key_dim, self.value_dim], 1))
        self.tables = self._hand_out_pages()
        memory = AttentionMemory(1, self.latent + self.shared_dim, str(self.dtype)[6:], latent=self.latent)
        # Another layer lies before this one in every page.
        self.spec = MemorySpec((AttentionMemory(1, 16, "float32"), memory), cell=self.cell)
        self.store = Store(self.spec, self.pages * self.spec.page_bytes, self.device)
        self.store.buffer.fill_(0xFF)
        for (start, _), table, line in zip(self.rows, self.tables, self.stored):
            for position in range(start):
                self.view.keys[table[position // self.cell], position % self.cell, 0] = line[position]

    @property
    def view(self) -> AttentionView:
        return self.store.views[1]

    def _hand_out_pages(self) -> list[list[int]]:
        counts = [-(-end // self.cell) for _, end in self.rows]
        self.pages = sum(counts) + 3
        free = torch.randperm(self.pages, generator=torch.Generator().manual_seed(1)).tolist()
        tables: list[list[int]] = []
        for count in counts:
            first = tables[0][: self.common] if tables else []
            tables.append([*first, *(free.pop() for _ in range(count - len(first)))])
        return tables

    def batch(self) -> Batch:
        width = max(map(len, self.tables))
        rows = [
            Row(start, end, 0, seat=number, pages=[*table, *[0] * (width - len(table))])
            for number, ((start, end), table) in enumerate(zip(self.rows, self.tables))
        ]
        board = torch.zeros(99, dtype=torch.int64, device=self.device)
        return build_batch(make_plan(rows), self.spec, board, self.device, self.operations)

    @property
    def new(self) -> Tensor:
        return torch.cat([line[start:] for line, (start, _) in zip(self.stored, self.rows)])

    def paged(self, out: Tensor | None = None) -> Tensor:
        latents, shared = self.new.split([self.latent, self.shared_dim], 1)
        inputs = LatentInputs(self.queries, latents, shared, self.weights, SCALE)
        return self.operations.attend_latents(inputs, self.batch(), self.view, out)

    def dense(self) -> Tensor:
        """Query by query, with the keys and values of every head, in float64."""
        out, place = [], 0
        for (start, end), line in zip(self.rows, self.stored):
            latent, shared = line.double().split([self.latent, self.shared_dim], 1)
            keys = torch.einsum("pl,hkl->hpk", latent, self.weights.keys.double())
            keys = torch.cat([keys, shared.expand(self.heads, -1, -1)], -1)
            values = torch.einsum("pl,hvl->hpv", latent, self.weights.values.double())
            for position in range(start, end):
                seen = slice(0, position + 1)
                scores = torch.einsum("hk,hpk->hp", self.queries[place].double(), keys[:, seen]) * SCALE
                out.append(torch.einsum("hp,hpv->hv", scores.softmax(-1), values[:, seen]).flatten())
                place += 1
        return torch.stack(out)


def error_of(scene: Scene) -> float:
    ours, reference = scene.paged(), scene.dense()
    assert torch.isfinite(ours).all()
    return float((ours - reference).norm() / reference.norm())


MIXES = {
    "a first token": [(0, 1)],
    "decodes": [(100, 101), (0, 1), (15, 16), (16, 17), (5, 6), (63, 64)],
    "prompts": [(0, 37), (21, 70)],
    "decodes and prompts": [(49, 50), (16, 17), (0, 17), (31, 47), (10, 12)],
}
