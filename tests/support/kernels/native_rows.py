"""Rows of one token each in twin memories: one for the reference, one for the kernels in C++.

What a row may look at is random, all else is NaN: a value from there, or one written where it does not belong, shows.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.support.kernels.operations import CPU, NATIVE
from tests.support.kernels.plans import NOWHERE, Capture, Row, make_plan
from weft.device.store import RecurrentView, Store
from weft.kernels.interface import Batch
from weft.kernels.native.library import available
from weft.memory.spec import MemorySpec, RecurrentMemory
from weft.runner.batching import build_batch

needs_compiler = pytest.mark.skipif(not available(), reason="there is no C++ compiler here")
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
CELL = 20
dtypes = st.sampled_from(list(NAMES))
# Places around a cell's ends more often than others; some in a sequence's first cell, some behind a ring's end.
starts = st.lists(
    st.sampled_from([0, 1, 2, 3, 18, 19, 20, 21, 22, 33, 39, 40, 79]) | st.integers(0, 99), min_size=1, max_size=9
)
Call = Callable[[Batch, RecurrentView], Tensor]


class Twins:
    """Memory of one layer, twice, as rows that start at the given positions left it."""

    def __init__(self, memory: RecurrentMemory, starts: list[int], room: int, seed: int, cell: int = CELL) -> None:
        self.spec = MemorySpec((memory,), cell=cell, draft_room=room)
        self.generator = torch.Generator().manual_seed(seed)
        units = 2 * len(starts) + 2
        order = torch.randperm(units, generator=self.generator).tolist()
        self.rows = [
            Row(start, start + 1, order[2 * index] if start >= cell else NOWHERE, tail=order[index], seat=index)
            for index, start in enumerate(starts)
        ]
        self.captures = [
            Capture(index, start + 1, order[2 * index + 1])
            for index, start in enumerate(starts)
            if (start + 1) % cell == 0 and (index + seed) % 4
        ]
        # States and tails in a store each, as no arena keeps them apart here.
        self.stores = [Store(self.spec, units * max(self.spec.state_bytes, self.spec.tail_bytes)) for _ in range(4)]
        for store in self.stores:
            store.buffer.fill_(0xFF)
        self.fill(self.view(0))
        for twin, store in zip(self.stores[2:], self.stores[:2]):
            twin.buffer.copy_(store.buffer)

    def view(self, twin: int) -> RecurrentView:
        states, tails = (store.views[0] for store in self.stores[2 * twin : 2 * twin + 2])
        return RecurrentView(states.state, tails.tail)

    def fill(self, view: RecurrentView) -> None:
        """What earlier steps left: the checkpoints, and in tails what came since."""
        for row in self.rows:
            if row.read_slot != NOWHERE:
                for part in view.state.values():
                    part[row.read_slot] = self.random(part[0].shape)
            for name, part in view.tail.items():
                opening = row.start - row.start % self.spec.cell
                values = self.random((row.start - opening, *part.shape[2:]))
                if name == "decay":
                    values = -values.abs().cumsum(0) * 0.1
                for position, value in zip(range(opening, row.start), values):
                    part[row.tail, position % part.shape[1]] = value

    def random(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def compare(self, call: Call, tolerance: float, kept_tolerance: float = 1e-5) -> None:
        """Both ways give the same outputs and leave the same memory behind."""
        answer = call(self.batch(native=False), self.view(0))
        found = call(self.batch(native=True), self.view(1))
        assert not found.isnan().any()
        torch.testing.assert_close(found, answer, rtol=tolerance, atol=tolerance)
        for expected, left in ((self.view(0).state, self.view(1).state), (self.view(0).tail, self.view(1).tail)):
            for name, values in expected.items():
                same = torch.isclose(left[name], values, kept_tolerance, kept_tolerance, equal_nan=True)
                assert same.all(), f"{name} differs at {(~same).nonzero()[:5].tolist()}"

    def batch(self, native: bool) -> Batch:
        plan, board = make_plan(self.rows, self.captures), torch.zeros(99, dtype=torch.int64)
        return build_batch(plan, self.spec, board, "cpu", NATIVE if native else CPU)
