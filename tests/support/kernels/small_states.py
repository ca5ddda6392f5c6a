"""Recurrences over states in fewer bits beside the same over float32, whose rows are cut at every border of a cell.

There the states are rounded by the definition. So a kernel may differ from itself in nothing but what it rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.kernels.operations import of_one_tensor
from tests.support.kernels.plans import NOWHERE, Capture, Row, make_plan
from weft.device.store import RecurrentView, Store
from weft.kernels.interface import Batch, Operations
from weft.kernels.recurrent import (
    ChannelDeltaInputs,
    ChannelDeltaShape,
    DeltaInputs,
    DeltaShape,
    SsdInputs,
    SsdShape,
)
from weft.kernels.states import decoded, encoded, states_of
from weft.memory.spec import MemorySpec, RecurrentMemory
from weft.runner.batching import build_batch

Packed = tuple[Tensor, ...]


class Ssd:
    name = "ssm"

    def __init__(self, heads: int = 4, head_dim: int = 5, state: int = 40, groups: int = 2) -> None:
        self.sizes = (heads, head_dim, state, groups)
        self.A, self.D = -torch.rand(heads) * 2 - 0.05, torch.randn(heads)

    def memory(self, by: Operations, stored: str, dtype: str) -> RecurrentMemory:
        return by.ssd_memory(SsdShape(*self.sizes, 3, 4, stored), dtype)

    def inputs(self, tokens: int, dtype: torch.dtype) -> Packed:
        heads, head_dim, state, groups = self.sizes
        B, C = (torch.randn(tokens, groups, state).to(dtype) * state**-0.5 for _ in range(2))
        return torch.randn(tokens, heads, head_dim).to(dtype), torch.rand(tokens, heads) * 0.3, B, C

    def call(self, packed: Packed, batch: Batch, view: RecurrentView) -> Tensor:
        x, dt, B, C = packed
        A, D = (each.to(x.device) for each in (self.A, self.D))
        return batch.operations.ssd(SsdInputs(x, dt, A, B, C, D), batch, view)


class GatedDelta:
    name = "delta"

    def __init__(self, key_heads: int = 2, key_dim: int = 40, value_heads: int = 4, value_dim: int = 5) -> None:
        self.sizes = (key_heads, key_dim, value_heads, value_dim)

    def memory(self, by: Operations, stored: str, dtype: str) -> RecurrentMemory:
        return by.gated_delta_memory(DeltaShape(*self.sizes, 3, 4, stored), dtype)

    def inputs(self, tokens: int, dtype: torch.dtype) -> Packed:
        key_heads, key_dim, value_heads, value_dim = self.sizes
        q, k = torch.randn(2, tokens, key_heads, key_dim).to(dtype)
        step, strength = -torch.rand(tokens, value_heads) * 0.3, torch.rand(tokens, value_heads)
        return q, k, torch.randn(tokens, value_heads, value_dim).to(dtype), step, strength

    def call(self, packed: Packed, batch: Batch, view: RecurrentView) -> Tensor:
        q, k, *rest = packed
        return batch.operations.gated_delta(DeltaInputs(*of_one_tensor(q, k), *rest), batch, view)


class ChannelDelta:
    name = "channel_delta"

    def __init__(self, heads: int = 2, key_dim: int = 40, value_dim: int = 5) -> None:
        self.sizes = (heads, key_dim, value_dim)

    def memory(self, by: Operations, stored: str, dtype: str) -> RecurrentMemory:
        return by.channel_delta_memory(ChannelDeltaShape(*self.sizes, 3, 4, stored), dtype)

    def inputs(self, tokens: int, dtype: torch.dtype) -> Packed:
        heads, key_dim, value_dim = self.sizes
        q, k, g = torch.randn(3, tokens, heads, key_dim)
        q, k, v = (x.to(dtype) for x in (q, k, torch.randn(tokens, heads, value_dim)))
        return q, k, v, -torch.rand_like(g) * 0.3, torch.rand(tokens, heads)

    def call(self, packed: Packed, batch: Batch, view: RecurrentView) -> Tensor:
        return batch.operations.channel_delta(ChannelDeltaInputs(*packed), batch, view)


RULES: dict[str, Callable[..., Any]] = {"ssd": Ssd, "gated_delta": GatedDelta, "channel_delta": ChannelDelta}


class Memory:
    """States and tails of one layer."""

    def __init__(self, memory: RecurrentMemory, cell: int, room: int, units: int, device: str) -> None:
        self.spec = MemorySpec((memory,), cell=cell, draft_room=room)
        size = units * max(self.spec.state_bytes, self.spec.tail_bytes)
        self.stores = [Store(self.spec, size, device) for _ in range(2)]
        for store in self.stores:
            store.buffer.fill_(0xFF)
        self.view = RecurrentView(self.stores[0].views[0].state, self.stores[1].views[0].tail)


class Twins:
    """`tolerance`: of outputs, where rows beside a row change its bits; None: there are none of them."""

    def __init__(
        self,
        rule: Any,
        by: Operations,
        stored: str,
        lengths: Sequence[int],
        cell: int = 16,
        room: int = 0,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        tolerance: float | None = None,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.random, self.rule, self.by, self.tolerance = random.Random(seed), rule, by, tolerance
        units = sum(length // cell + 1 for length in lengths) + 2 * len(lengths) + 2
        name = str(dtype).removeprefix("torch.")
        self.small, self.wide = (
            Memory(rule.memory(by, each, name), cell, room, units, device) for each in (stored, "float32")
        )
        self.inputs = [self.placed(rule.inputs(length, dtype)) for length in lengths]
        self.filler = self.placed(rule.inputs(2, dtype))
        self.computed = [0] * len(lengths)
        self.slots: list[dict[int, int]] = [{} for _ in lengths]
        order = self.random.sample(range(units), units)
        # The last tail and slots are for rows that only stand beside others.
        self.free, self.tails = order, self.random.sample(range(units), len(lengths) + 1)

    def placed(self, inputs: Packed) -> Packed:
        return tuple(each.to(self.device) for each in inputs)

    @property
    def cell(self) -> int:
        return self.small.spec.cell

    def run(self, lengths: Sequence[int]) -> None:
        while going := [i for i, inputs in enumerate(self.inputs) if self.computed[i] < len(inputs[0])]:
            chosen = [i for i in going if self.random.random() < 0.7] or going[:1]
            self.step(
                [(i, min(self.random.choice(lengths), len(self.inputs[i][0]) - self.computed[i])) for i in chosen]
            )

    def step(self, chunks: Sequence[tuple[int, int]]) -> None:
        chunks = sorted(chunks, key=lambda chunk: chunk[1] > 1)
        spans = {index: (self.computed[index], self.computed[index] + count) for index, count in chunks}
        wanted = [
            (index, position, self.free.pop())
            for index, (start, end) in spans.items()
            for position in range(start - start % self.cell + self.cell, end + 1, self.cell)
            if position > end - self.cell or self.random.random() < 0.5
        ]
        captured = {(index, position): slot for index, position, slot in wanted}
        outputs = self.call(self.small, spans, captured, len([1 for _, count in chunks if count == 1]))
        expected = {index: list[Tensor]() for index in spans}
        for number, pieces in enumerate(self.cut(spans)):
            ends = {(i, end): captured.get((i, end)) for i, (_, end) in pieces.items() if end % self.cell == 0}
            slots = {key: self.free.pop() if slot is None else slot for key, slot in ends.items()}
            decodes = 0 if number else len([1 for _, count in chunks if count == 1])
            for index, found in self.call(self.wide, pieces, slots, decodes).items():
                expected[index].append(found)
            for (index, position), slot in slots.items():
                self.round(slot, (index, position) in captured)
                self.slots[index][position] = slot
        for index, (_, end) in spans.items():
            self.same(outputs[index], torch.cat(expected[index]), f"outputs of {spans[index]}")
            for name, part in self.wide.view.tail.items():
                if name != "conv":
                    found, expected_tail = (each[self.tails[index]] for each in (self.small.view.tail[name], part))
                    kept = self.kept(end, len(part[0]))
                    self.same(found[kept], expected_tail[kept], f"tail {name}")
            self.computed[index] = end

    def kept(self, end: int, ring: int) -> list[int]:
        """Return the places of a ring that a later row may read: other ones need not be written."""
        earliest = max(end - self.small.spec.draft_room, 0)
        return [position % ring for position in range(earliest - earliest % self.cell, end)]

    def cut(self, spans: dict[int, tuple[int, int]]) -> Iterator[dict[int, tuple[int, int]]]:
        """Yield the first pieces of all spans, then the second ones, and so on."""
        while spans:
            pieces = {i: (low, min(high, low - low % self.cell + self.cell)) for i, (low, high) in spans.items()}
            yield pieces
            spans = {i: (pieces[i][1], high) for i, (_, high) in spans.items() if pieces[i][1] < high}

    def call(
        self,
        memory: Memory,
        spans: dict[int, tuple[int, int]],
        captured: dict[tuple[int, int], int],
        decodes: int,
    ) -> dict[int, Tensor]:
        """Compute rows, the first `decodes` of them as decodes; other rows of one token have one before them."""
        order = sorted(spans, key=lambda index: list(spans).index(index))
        beside = any(spans[index][1] - spans[index][0] == 1 for index in order[decodes:])
        rows, parts = [], []
        for index in order[:decodes]:
            rows.append(self.row(index, *spans[index]))
            parts.append(tuple(x[slice(*spans[index])] for x in self.inputs[index]))
        if beside:
            rows.append(Row(0, 2, NOWHERE, self.tails[-1], seat=len(self.inputs)))
            parts.append(self.filler)
        for index in order[decodes:]:
            rows.append(self.row(index, *spans[index]))
            parts.append(tuple(x[slice(*spans[index])] for x in self.inputs[index]))
        places = {index: order.index(index) + (beside and order.index(index) >= decodes) for index in order}
        captures = [Capture(places[index], position, slot) for (index, position), slot in sorted(captured.items())]
        captures.sort()
        board = torch.zeros(99, dtype=torch.int64, device=self.device)
        batch = build_batch(make_plan(rows, captures), memory.spec, board, self.device, self.by)
        assert batch.decodes == decodes
        packed = tuple(torch.cat(tensors) for tensors in zip(*parts))
        y = self.rule.call(packed, batch, memory.view)
        lengths = [len(part[0]) for part in parts]
        return {index: y.split(lengths)[places[index]] for index in order}

    def row(self, index: int, start: int, end: int) -> Row:
        slot = self.slots[index][start - start % self.cell] if start >= self.cell else NOWHERE
        return Row(start, end, slot, self.tails[index], seat=index)

    def round(self, slot: int, is_captured: bool) -> None:
        """Round a state of the wide twin; compare it if the other has captured it."""
        state, stored = self.wide.view.state[self.rule.name][slot], states_of(self.small.view, self.rule.name)
        if stored.scales is None:
            rounded = state.to(stored.numbers.dtype).float()
        else:
            codes, scales = encoded(state)
            rounded = decoded(codes, scales)
            if is_captured and self.tolerance is None:
                assert torch.equal(stored.numbers[slot], codes)
                assert torch.equal(stored.scales[slot], scales)
        if is_captured:
            self.same(stored.read(slot), rounded, "a state", 1.02 * state.abs().amax().item() / 127)
            if self.tolerance is not None:
                # One number may be rounded up where the other is rounded down.
                rounded = stored.read(slot).clone()
        state.copy_(rounded)

    def same(self, found: Tensor, expected: Tensor, what: str, near: float = 0.0) -> None:
        if self.tolerance is None:
            assert found.equal(expected) or torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)), what
        else:
            limit = max(self.tolerance, near)
            torch.testing.assert_close(
                found, expected, rtol=0, atol=limit, equal_nan=True, msg=lambda m: f"{what}\n{m}"
            )
