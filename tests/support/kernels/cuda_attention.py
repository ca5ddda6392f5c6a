"""Rows of paged attention in twin memories, for the kernels of a GPU and for the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.kernels.operations import GPU_ROWS, PLAIN, attention
from tests.support.kernels.plans import Row, make_plan
from weft.device.store import AttentionView
from weft.kernels.cuda import attention as on_gpu
from weft.kernels.cuda.attention.flashinfer import WrapperShape
from weft.kernels.interface import Operations
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.runner.batching import build_batch

SCALE = 0.3
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass
class Scene:
    """Rows [start, end), pages with all that their sequences hold before `start`, NaN everywhere else."""

    rows: list[tuple[int, int]]
    window: int | None = None
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    cell: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    scale: float = SCALE
    spare: int = 0  # tokens before the window whose cells are still listed

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(len(self.rows) + self.rows[0][1])

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self.device).to(self.dtype)

        tokens = sum(end - start for start, end in self.rows)
        # Queries, keys and values as a projection leaves them: side by side.
        packed = random(tokens, self.heads + 2 * self.kv_heads, self.head_dim)
        self.q, self.k, self.v = packed.split([self.heads, self.kv_heads, self.kv_heads], 1)
        self.sinks = random(self.heads)
        first_cells = [self.first_cell(start) for start, _ in self.rows]
        counts = [-(-end // self.cell) - first for (_, end), first in zip(self.rows, first_cells)]
        self.pages = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(1)).tolist()
        tables = [self.pages[sum(counts[:row]) :][:count] for row, count in enumerate(counts)]
        # Strides as in the store: other layers lie between the pages.
        self.store = torch.full(
            (len(self.pages), 5, self.cell, self.kv_heads, self.head_dim),
            torch.nan,
            dtype=self.dtype,
            device=self.device,
        )
        for (start, _), first, table in zip(self.rows, first_cells, tables):
            for number, page in enumerate(table):
                known = min(self.cell, start - (first + number) * self.cell)
                if known > 0:
                    self.store[page, 1:3, :known] = random(2, known, self.kv_heads, self.head_dim)
        # The reference looks at what fills up the table, and masks it.
        tables = [[*table, *[0] * (max(counts) - len(table))] for table in tables]
        plan_rows = [
            Row(start, end, pages=table, window_pages=table, window_first=first)
            for (start, end), table, first in zip(self.rows, tables, first_cells)
        ]
        memory = AttentionMemory(self.kv_heads, self.head_dim, NAMES[self.dtype], self.window)
        self.plan, self.spec = make_plan(plan_rows), MemorySpec((memory,), cell=self.cell)

    def first_cell(self, start: int) -> int:
        return 0 if self.window is None else max(0, start - self.window + 1 - self.spare) // self.cell

    def batch(self, operations: Operations = GPU_ROWS):
        board = torch.zeros(9, dtype=torch.int64, device=self.device)
        return build_batch(self.plan, self.spec, board, self.device, operations)

    def view(self) -> AttentionView:
        return AttentionView(self.store[:, 1], self.store[:, 2], self.window)

    def reference(self, softcap: float | None = None, sinks: bool = False) -> Tensor:
        """In float32, on pages of its own."""
        store = self.store.float()
        view = AttentionView(store[:, 1], store[:, 2], self.window)
        sink = self.sinks.float() if sinks else None
        q, k, v = (x.float() for x in (self.q, self.k, self.v))
        return attention(q, k, v, self.batch(PLAIN), view, self.scale, softcap, sink)

    def ours(self, softcap: float | None = None, sinks: bool = False) -> Tensor:
        sink = self.sinks if sinks else None
        return attention(self.q, self.k, self.v, self.batch(), self.view(), self.scale, softcap, sink)

    def shape(self, softcap: float | None = None) -> WrapperShape:
        return on_gpu.shape_of(self.q, self.view(), self.scale, softcap)


MIXES = {
    "decodes": [(100, 101), (0, 1), (15, 16), (16, 17), (5, 6), (63, 64)],
    "prompts": [(0, 37), (21, 70)],
    "decodes and prompts": [(49, 50), (16, 17), (0, 17), (31, 47), (10, 12), (48, 49)],
}
REAL = [(4000, 4001), (63, 64), (64, 65), (0, 1), (700, 701), (0, 777), (1000, 1300), (64, 128), (500, 505)]
LAYER = WrapperShape(torch.bfloat16, 32, 8, 128, 64, 0.1, None, None)
