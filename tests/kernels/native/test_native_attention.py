"""Attention of rows of one token in C++ equals the references: norm, rotation, writing, reading and gate."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.kernels.native_rows import NAMES, dtypes, needs_compiler
from tests.support.kernels.operations import CPU, NATIVE, attention
from tests.support.kernels.plans import Row, make_plan
from weft.device.store import AttentionView
from weft.kernels.cpu.activation import gated_product
from weft.kernels.cpu.norm import rms_norm_heads
from weft.kernels.cpu.rotary import make_rotation, rotate
from weft.kernels.interface import Batch
from weft.kernels.native import attention as native
from weft.kernels.rotary import RotaryKind, frequencies
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.models.layers.attention import Attention, AttentionShape
from weft.runner.batching import build_batch

pytestmark = needs_compiler
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
    ) -> Tensor:
        """The kernel's results; those of the reference, and what both leave in the pages, are the same."""
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
        reading = (batch, self.view(ours), SCALE, softcap, sink)
        found = native.mix(projected, heads, weight, EPS, rotation, *reading, gated=gated)

        together = projected[:, :turning]
        together = together if weight is None else rms_norm_heads(together, weight, EPS)
        together = together if rotation is None else rotate(together, rotation)
        inputs = (together[:, :heads], together[:, heads:], projected[:, turning : turning + self.kv_heads])
        # In float32, as the reference rounds its weights to the model's dtype, which the kernel does not.
        theirs = self.store.float()
        expected = attention(
            *(x.float() for x in inputs),
            plain,
            self.view(theirs),
            SCALE,
            softcap,
            None if sink is None else sink.float(),
        ).to(self.dtype)
        if gated:
            expected = gated_product(projected[:, turning + self.kv_heads :], expected, torch.sigmoid)
        tolerance = tolerance or TOLERANCES[self.dtype]
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ours.float(), theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
        return found


starts = st.lists(st.sampled_from([0, 1, 15, 16, 17, 47, 48, 63]) | st.integers(0, 150), min_size=1, max_size=9)
shapes = st.tuples(
    st.integers(1, 3), st.sampled_from([1, 2, 3, 4, 5, 6, 7, 13]), st.sampled_from([2, 8, 16, 24, 64, 82])
)
windows = st.sampled_from([None, 1, 7, 16, 17, 40, 100, 1000])


@settings(max_examples=150, deadline=None)
@given(starts, dtypes, shapes, windows, st.integers(0, 4), st.sampled_from([0, 20]), st.data())
def test_rows_and_what_they_leave_equal_the_reference(starts, dtype, shape, window, shared, spare, data):
    kv_heads, group, head_dim = shape
    scene = Scene(starts, dtype, kv_heads, group, head_dim, window, shared * CELL, spare, seed=len(starts))
    scene.compare(
        rotary=data.draw(st.sampled_from([None, head_dim, 2 * (head_dim // 3)]).filter(lambda size: size != 0)),
        norm=data.draw(st.sampled_from([None, torch.float32, dtype])),
        gated=data.draw(st.booleans()),
        softcap=data.draw(st.sampled_from([None, 2.0, 50.0])),
        sinks=data.draw(st.booleans()),
    )


@pytest.mark.parametrize("stretch", [16, 32, 512])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("window", [None, 100])
def test_how_the_work_is_shared_out_changes_nothing(monkeypatch, stretch, threads, window):
    monkeypatch.setattr(native, "STRETCH", stretch)
    monkeypatch.setattr(native, "LEAST_SHARED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    Scene([200, 3, 95, 700, 96, 701], window=window, shared=96).compare(sinks=True)


def test_a_row_comes_out_the_same_bit_by_bit_whoever_is_beside_it(monkeypatch):
    monkeypatch.setattr(native, "STRETCH", 64)
    starts = [300, 305, 150, 310, 129]
    scene = Scene(starts, head_dim=40, shared=128)
    q, k, v = (scene.random(len(starts), heads, 40) for heads in (6, 2, 2))
    together = attention(q, k, v, scene.batch(True), scene.view(scene.store), SCALE)
    for row, start in enumerate(starts):
        pages = scene.plan.page_table[row, : start // CELL + 1].tolist()
        alone = replace(scene, starts=[start])
        alone.plan = make_plan([Row(start, start + 1, pages=pages)])
        inputs = (x[row : row + 1] for x in (q, k, v))
        found = attention(*inputs, alone.batch(True), scene.view(scene.store), SCALE)
        assert found.equal(together[row : row + 1])


def test_keys_are_rounded_where_the_reference_rounds():
    """After the norm, after the product with the cosine and at the end: all but a few are the same bit by bit."""
    scene = Scene([40] * 9, torch.bfloat16, head_dim=64)
    projected, weight = scene.random(9, 10, 64), 1 + 0.2 * scene.random(8, 64).float()
    batch = scene.batch(True)
    rotation = make_rotation(batch.positions, frequencies(RotaryKind(48)), 1.0, torch.bfloat16)
    native.mix(projected, 6, weight, EPS, rotation, batch, scene.view(scene.store), SCALE)
    keys = rotate(rms_norm_heads(projected[:, :8], weight, EPS), rotation)[:, 6:]
    written = scene.store[batch.full.write_page, 1, 40 % CELL]
    assert (written == keys).float().mean() > 0.999


@pytest.mark.parametrize("dtype", NAMES)
def test_cells_longer_than_a_chunk_are_read_to_their_end(dtype):
    Scene([250, 99, 63, 64], dtype, cell=100, window=130).compare()


@pytest.mark.parametrize("dtype", NAMES)
def test_heads_and_cells_of_real_models(dtype):
    Scene([1100, 1101, 70, 1150], dtype, kv_heads=2, group=3, head_dim=128, cell=64, shared=1024).compare(
        rotary=32, norm=torch.float32, gated=True
    )


def test_scores_far_apart_neither_overflow_nor_vanish():
    scene = Scene([90, 40], head_dim=16)
    scene.store *= 30
    # Scores of some hundreds are rounded by some 1e-5, each processor in its own way, and weights with them.
    scene.compare(sinks=True, tolerance=1e-3)


def test_a_nan_that_a_row_sees_is_not_hidden():
    scene = Scene([700, 40], shared=0)
    scene.store[scene.plan.page_table[0, 5], 1, 3] = torch.nan
    q, k, v = (scene.random(2, heads, 24) for heads in (6, 2, 2))
    out = attention(q, k, v, scene.batch(True), scene.view(scene.store), SCALE)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("gated", [False, True])
def test_the_layer_gives_the_same_either_way(gated):
    shape = AttentionShape(
        hidden=32,
        heads=6,
        kv_heads=2,
        head_dim=24,
        dtype=torch.float32,
        norm_eps=EPS,
        softcap=5.0,
        sinks=True,
        gated=gated,
    )
    layer, scene = Attention(shape), Scene([40, 7, 100])
    for parameter in layer.parameters():
        parameter.data.copy_(scene.random(*parameter.shape) / 4)
    layer.index = 0
    x, plain = scene.random(3, 32), scene.batch(False)
    rotation = make_rotation(plain.positions, frequencies(RotaryKind(24)), 1.0, torch.float32)
    stores = scene.store.clone(), scene.store.clone()
    answers = [
        layer(x, rotation, batch, (scene.view(store),)) for batch, store in zip((plain, scene.batch(True)), stores)
    ]
    torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*stores, rtol=1e-5, atol=1e-5, equal_nan=True)
