"""Sequences with given tokens, computed by hand-made steps on a runner: what each row and each cell of memory becomes.

Chunks start on the grid; a row of one token is a decode. Sequences own all units that they will ever need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tests.support.kernels.plans import NOWHERE, Capture, Row, make_plan
from weft.base.plan import Plan
from weft.kernels.choosing import EXACT as GROUPS_OF_ITS_OWN
from weft.kernels.choosing import GROUPS, assemble
from weft.kernels.interface import Operations
from weft.memory.kinds import Kind
from weft.memory.spec import MemorySpec
from weft.models.model import CausalModel
from weft.runner.batching import build_batch
from weft.runner.runner import Runner

EXACT = assemble({group: "exact" if group in GROUPS_OF_ITS_OWN else "cuda" for group in GROUPS})


@dataclass
class Sequenced:
    """A sequence, its units, and the logits after every row that it had."""

    tokens: Sequence[int]
    tail: int
    pages: list[int]
    windows: list[int]
    slots: list[int]  # of the states at the end of cells 0, 1, ...
    computed: int = 0
    logits: dict[int, Tensor] = field(default_factory=dict)


class Steps:
    """Runs steps. `trims`: windowed layers list no cell before their window."""

    def __init__(self, runner: Runner, trims: bool = False) -> None:
        self.runner, self.spec, self.trims = runner, runner.spec, trims
        self.used = 0
        runner.store.buffer.zero_()

    def _take(self, kind: Kind, count: int) -> list[int]:
        size = self.runner.store.unit_bytes.get(kind)
        if size is None or not count:
            return [0] * count
        first = -(-self.used // size)
        self.used = (first + count) * size
        assert self.used <= len(self.runner.store.buffer), "a test needs more memory"
        return list(range(first, first + count))

    def add(self, tokens: Sequence[int]) -> Sequenced:
        cells, whole = -(-len(tokens) // self.spec.cell), len(tokens) // self.spec.cell
        counts = {Kind.PAGE: cells, Kind.WINDOW: cells, Kind.STATE: whole}
        return Sequenced(tokens, self._take(Kind.TAIL, 1)[0], *(self._take(*count) for count in counts.items()))

    @torch.inference_mode()
    def run(self, *parts: tuple[Sequenced, int], recorded: bool = False) -> None:
        """Compute as many more tokens of each sequence, all in one step, and keep the logits after the last ones."""
        parts = tuple(sorted(parts, key=lambda part: part[1] > 1))
        plan = self._plan(parts)
        if recorded:
            assert self.runner.recorded is not None
            output = self.runner.recorded.run(plan)
            assert output is not None, "no recorded step is as large"
            logits = output.logits[: len(parts)]
        else:
            runner = self.runner
            batch = build_batch(plan, self.spec, runner.placed.boards.token, runner.device, runner.operations)
            hidden = runner.eager.forward(batch)
            logits = runner.model.logits(hidden[batch.first[1:].long() - 1], batch)
        for (sequence, count), line in zip(parts, logits.clone()):
            sequence.computed += count
            sequence.logits[sequence.computed] = line

    def _plan(self, parts: Sequence[tuple[Sequenced, int]]) -> Plan:
        cell, rows, captures = self.spec.cell, [], []
        most = max(-(-(sequence.computed + count) // cell) for sequence, count in parts)
        for number, (sequence, count) in enumerate(parts):
            start, end = sequence.computed, sequence.computed + count
            assert count == 1 or start % cell == 0, "chunks start on the grid"
            first = max(0, start - (self.spec.window or 0) + 1) // cell if self.trims else 0
            cells = -(-end // cell)
            slot = sequence.slots[start // cell - 1] if start >= cell else NOWHERE
            rows.append(
                Row(
                    start, end, slot, sequence.tail, seat=number, pages=filled(sequence.pages[:cells], most),
                    window_pages=filled(sequence.windows[first:cells], most), window_first=first,
                    tokens=sequence.tokens[start:end],
                )
            )  # fmt: skip
            closed = range(start // cell + 1, end // cell + 1)
            captures += [Capture(number, cell * each, sequence.slots[each - 1]) for each in closed]
        if Kind.STATE not in self.runner.store.unit_bytes:
            captures = []
        return make_plan(rows, captures)

    def memory(self, sequence: Sequenced) -> list[Tensor]:
        """Return the bytes of all whole cells, and of the states behind them."""
        whole = sequence.computed // self.spec.cell
        units = {Kind.PAGE: sequence.pages, Kind.STATE: sequence.slots}
        store = self.runner.store
        return [store.unit(kind, index) for kind in units if kind in store.unit_bytes for index in units[kind][:whole]]


def filled(pages: list[int], length: int) -> list[int]:
    """Return the pages, with valid ones behind them: a CPU looks at those, and masks them."""
    return [*pages, *[0] * (length - len(pages))]


def drawn(count: int, seed: int, vocabulary: int = 250) -> list[int]:
    return np.random.default_rng(seed).integers(1, vocabulary, count).tolist()


def spec_for(model: CausalModel, operations: Operations = EXACT) -> MemorySpec:
    return MemorySpec(model.memories(operations))
