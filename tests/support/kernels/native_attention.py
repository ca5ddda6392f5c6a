"""Rows of one token in twin memories, for attention in C++ and for the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.support.kernels.coded_pages import held, in_codes
from tests.support.kernels.native_rows import NAMES
from tests.support.kernels.operations import CPU, NATIVE, attention
from tests.support.kernels.plans import Row, make_plan
from weft.device.store import AttentionView
from weft.kernels.cpu.activation import gated_product
from weft.kernels.cpu.norm import rms_norm_heads
from weft.kernels.cpu.rotary import make_rotation, rotate
from weft.kernels.interface import Batch
from weft.kernels.native import attention as native
from weft.kernels.pages import BROKEN, encoded
from weft.kernels.rotary import RotaryKind, frequencies
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.runner.batching import build_batch

CELL, SCALE, EPS = 16, 0.3, 1e-5
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass
class Scene:
    """Rows of one token at these positions: their pages hold what came before, everything else is NaN."""

    starts: list[int]
    dtype: torch.dtype = torch.float32
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 24
    window: int | None = None
    shared: int = 0  # tokens that all rows who are that far have in common, in the same pages
    spare: int = 0  # tokens before the window whose cells are still listed
    seed: int = 0
    cell: int = CELL

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.heads = self.kv_heads * self.group
        firsts = [self.first_cell(start) for start in self.starts]
        common = self.shared // self.cell
        free = torch.randperm(common + sum(s // self.cell + 1 for s in self.starts) + 3, generator=self.generator)
        pages = free.tolist()
        self.store = torch.full(
            # Strides as in the store: other layers lie between the pages.
            (len(pages), 5, self.cell, self.kv_heads, self.head_dim),
            torch.nan,
            dtype=self.dtype,
        )
        beginning = [pages.pop() for _ in range(common)]
        tables = []
        for start in self.starts:
            same = beginning if start >= self.shared else []
            tables.append([*same, *(pages.pop() for _ in range(start // self.cell + 1 - len(same)))])
        for start, first, table in zip(self.starts, firsts, tables):
            for cell in range(first, len(table)):
                known = min(self.cell, start - cell * self.cell)
                if known > 0:
                    self.store[table[cell], 1:3, :known] = self.random(2, known, self.kv_heads, self.head_dim)
        lists = [table[first:] for table, first in zip(tables, firsts)]
        # The reference looks at what fills up the table, and masks it.
        lists = [[*line, *[0] * (max(map(len, lists)) - len(line))] for line in lists]
        self.plan = make_plan(
            [
                Row(start, start + 1, pages=line, window_pages=line, window_first=first)
                for start, line, first in zip(self.starts, lists, firsts)
            ]
        )

    def first_cell(self, start: int) -> int:
        return 0 if self.window is None else max(0, start - self.window + 1 - self.spare) // self.cell

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def batch(self, native: bool) -> Batch:
        memory = AttentionMemory(self.kv_heads, self.head_dim, NAMES[self.dtype], self.window)
        spec = MemorySpec((memory,), cell=self.cell)
        return build_batch(self.plan, spec, torch.zeros(9, dtype=torch.int64), "cpu", NATIVE if native else CPU)

    def view(self, store: Tensor) -> AttentionView:
        return AttentionView(store[:, 1], store[:, 2], self.window)

    def compare(
        self,
        rotary: int | None = None,
        norm: torch.dtype | None = None,
        gated: bool = False,
        softcap: float | None = None,
        sinks: bool = False,
        tolerance: float | None = None,
        kind: torch.dtype | None = None,
    ) -> Tensor:
        """Return the kernel's results, after comparing them, and the pages it wrote, with those of the reference.

        With pages of codes of this `kind`, the reference reads what they hold.
        """
        heads, turning = self.heads, self.heads + self.kv_heads
        # Behind what the layer looks at there is more, as in a projection of several layers.
        projected = self.random(len(self.starts), turning + self.kv_heads + heads + 1, self.head_dim)[:, :-1]
        weight = None if norm is None else (1 + 0.2 * self.random(turning, self.head_dim)).to(norm)
        sink = self.random(heads) if sinks else None
        plain, batch = self.batch(False), self.batch(True)
        rotation = None
        if rotary is not None:
            rotation = make_rotation(plain.positions, frequencies(RotaryKind(rotary)), 1.1, self.dtype)
        ours = self.store.clone()
        before = (projected, heads, weight, EPS, rotation, batch)
        found = native.mix(*before, self.view(ours), SCALE, softcap, sink, gated=gated)

        together = projected[:, :turning]
        together = together if weight is None else rms_norm_heads(together, weight, EPS)
        together = together if rotation is None else rotate(together, rotation)
        queries, *new = together[:, :heads], together[:, heads:], projected[:, turning : turning + self.kv_heads]
        # In float32, as the reference rounds its weights to the model's dtype, which the kernel does not.
        theirs = self.store.float()
        read = self.view(theirs)
        if kind is not None:
            coded = in_codes(self.view(self.store), kind)
            found = native.mix(*before, coded, SCALE, softcap, sink, gated=gated)
            self.check_codes(coded, self.view(ours), kind)
            read = held(coded, torch.float32)
            new = [part[self.written] for part in (read.keys, read.values)]
        expected = attention(
            queries.float(),
            *(x.float() for x in new),
            plain,
            read,
            SCALE,
            softcap,
            None if sink is None else sink.float(),
        ).to(self.dtype)
        if gated:
            expected = gated_product(projected[:, turning + self.kv_heads :], expected, torch.sigmoid)
        tolerance = tolerance or TOLERANCES[self.dtype]
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        if kind is None:
            torch.testing.assert_close(ours.float(), theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
        return found

    @property
    def written(self) -> tuple[Tensor, Tensor]:
        """Pages that the rows write to, and the places in them."""
        return self.batch(True).pages(self.window).write_page, torch.tensor(self.starts) % self.cell

    def check_codes(self, found: AttentionView, wide: AttentionView, kind: torch.dtype) -> None:
        """Pages of codes hold the codes of what the kernel leaves in pages of the model's own dtype."""
        for part, exponents, numbers in (
            (found.keys, found.key_exponents, wide.keys),
            (found.values, found.value_exponents, wide.values),
        ):
            codes, expected = encoded(numbers, kind)
            assert exponents is not None
            assert torch.equal(exponents, expected)
            # Codes of what is no number may be any.
            known = expected.unsqueeze(-1) != BROKEN
            assert torch.equal(part.view(torch.uint8) * known, codes.view(torch.uint8) * known)


starts = st.lists(st.sampled_from([0, 1, 15, 16, 17, 47, 48, 63]) | st.integers(0, 150), min_size=1, max_size=9)
