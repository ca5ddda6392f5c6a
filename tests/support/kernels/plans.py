"""Plans made by hand, and a rig that drives recurrent kernels through many of them against known answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.support.kernels.operations import CPU
from weft.base.plan import Captures, Plan, Sampling
from weft.device.store import RecurrentView, Store
from weft.kernels.interface import Batch, Operations
from weft.memory.kinds import Kind
from weft.memory.spec import MemorySpec, RecurrentMemory
from weft.runner.batching import build_batch

# Stands where no checkpoint exists: whoever looks is out of bounds.
NOWHERE = 1 << 30


class Row(NamedTuple):
    start: int
    end: int
    read_slot: int = NOWHERE
    tail: int = 0
    seat: int = 0
    from_board: int = 0
    pages: Sequence[int] = ()
    window_pages: Sequence[int] = ()
    window_first: int = 0
    tokens: Sequence[int] | None = None


class Capture(NamedTuple):
    row: int
    position: int
    slot: int


def ints(values: Sequence[int]) -> np.ndarray:
    return np.array(list(values), np.int32)


def table(lines: Sequence[Sequence[int]]) -> np.ndarray:
    width = max(map(len, lines))
    return np.array([[*line, *[NOWHERE] * (width - len(line))] for line in lines], np.int32).reshape(len(lines), width)


def make_plan(rows: Sequence[Row], captures: Sequence[Capture] = ()) -> Plan:
    """A plan of `rows`, in this order; each samples a token. Tokens are numbered through unless given."""
    lengths = [row.end - row.start for row in rows]
    tokens = [row.tokens if row.tokens is not None else range(row.start, row.end) for row in rows]
    assert [len(line) for line in tokens] == lengths
    return Plan(
        number=0,
        seat=ints(row.seat for row in rows),
        start=ints(row.start for row in rows),
        end=ints(row.end for row in rows),
        tokens=ints(token for line in tokens for token in line),
        from_board=ints(row.from_board for row in rows),
        read_slot=ints(row.read_slot for row in rows),
        tail=ints(row.tail for row in rows),
        page_table=table([row.pages for row in rows]),
        window_table=table([row.window_pages for row in rows]),
        window_first=ints(row.window_first for row in rows),
        captures=Captures(*(ints(column) for column in (zip(*captures) if captures else ([], [], [])))),
        sampled=ints(range(len(rows))),
        sampling=Sampling.greedy(len(rows)),
        score_index=ints([]),
        score_token=ints([]),
        score_top=0,
    )


@dataclass
class Known:
    """A sequence with its answers: inputs and outputs by position, states by the number of tokens read."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    states: dict[str, Tensor]
    computed: int = 0
    tail: int = 0
    slots: dict[int, int] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.inputs[0])


Call = Callable[[tuple[Tensor, ...], Batch, RecurrentView], tuple[Tensor, ...]]


class Rig:
    """Runs sequences chunk by chunk through a kernel; every output and every captured state is compared.

    All memory is NaN at first, and again when freed. Tails and slots are given out in random order.
    """

    def __init__(
        self,
        memory: RecurrentMemory,
        sequences: Sequence[Known],
        call: Call,
        cell: int = 8,
        room: int = 0,
        seed: int = 0,
        operations: Operations = CPU,
        device: str = "cpu",
    ) -> None:
        self.operations, self.device = operations, device
        self.spec = MemorySpec((memory,), cell=cell, draft_room=room)
        self.random = random.Random(seed)
        self.sequences, self.call = sequences, call
        units = sum(s.length // cell + 1 for s in sequences)
        bytes_needed = units * max(self.spec.state_bytes, self.spec.tail_bytes) + 64
        # States and tails in one buffer each: the rig has no arena to keep them apart.
        self.states, self.tails = (Store(self.spec, -(-bytes_needed // 64) * 64, device) for _ in range(2))
        for store in (self.states, self.tails):
            store.buffer.fill_(0xFF)
        self.view = RecurrentView(self.states.views[0].state, self.tails.views[0].tail)
        self.free_slots = self.random.sample(range(units), units)
        for sequence, tail in zip(sequences, self.random.sample(range(units), len(sequences))):
            sequence.computed, sequence.tail, sequence.slots = 0, tail, {}
        self.tolerance = 2e-5

    def step(self, chunks: Sequence[tuple[int, int]], rejected: Mapping[int, int] = MappingProxyType({})) -> None:
        """Extend sequences by so many tokens each, all in one plan. One-token rows mostly go first.

        Of the sequences in `rejected`, so many of the last tokens are drafts that turn out wrong, and are undone.
        """
        if self.random.random() < 0.8:
            chunks = sorted(chunks, key=lambda chunk: chunk[1] > 1)
        chosen = [self.sequences[index] for index, _ in chunks]
        spans = [(s.computed, s.computed + count) for s, (_, count) in zip(chosen, chunks)]
        wrong = [rejected.get(index, 0) for index, _ in chunks]
        captures = [
            Capture(row, position, self.free_slots.pop())
            for row, (start, end) in enumerate(spans)
            for position in self.wanted(start, end)
        ]
        cell = self.spec.cell
        rows = [
            Row(start, end, s.slots[start - start % cell] if start >= cell else NOWHERE, s.tail, seat=index)
            for s, (start, end), (index, _) in zip(chosen, spans, chunks)
        ]
        board = torch.zeros(99, dtype=torch.int64, device=self.device)
        batch = build_batch(make_plan(rows, captures), self.spec, board, self.device, self.operations)
        packed = tuple(x.to(self.device) for x in self.pack(chosen, spans, wrong))
        outputs = self.call(packed, batch, self.view)
        for row, (sequence, (start, end)) in enumerate(zip(chosen, spans)):
            right = end - start - wrong[row]
            first = sum(e - s for s, e in spans[:row])
            for number, (output, answers) in enumerate(zip(outputs, sequence.outputs)):
                found = output[first:][:right]
                self.compare(found, answers[start : start + right], f"output {number} of row {row} of {spans}")
        for row, position, slot in captures:
            chosen[row].slots[position] = slot
            if position <= spans[row][1] - wrong[row]:
                for name, answers in chosen[row].states.items():
                    what = f"{name} at {position} of row {row} of {spans}"
                    self.compare(self.view.state[name][slot], answers[position], what)
        for (index, _), (_, end), count in zip(chunks, spans, wrong):
            self.roll_back(index, end - count)

    def step_with_padding(self, longest: int) -> None:
        """Read all sequences from their starts; those with more than `longest` tokens are padding, whose outputs are
        zeros."""
        spans = [(0, sequence.length) for sequence in self.sequences]
        rows = [Row(0, s.length, NOWHERE, s.tail, seat=index) for index, s in enumerate(self.sequences)]
        board = torch.zeros(99, dtype=torch.int64, device=self.device)
        batch = build_batch(make_plan(rows, []), self.spec, board, self.device, self.operations)
        packed = tuple(x.to(self.device) for x in self.pack(self.sequences, spans, [0] * len(spans)))
        (output,) = self.call(packed, replace(batch, longest=longest), self.view)
        first = 0
        for sequence in self.sequences:
            found, answer = output[first:][: sequence.length], sequence.outputs[0]
            self.compare(found, answer if sequence.length <= longest else torch.zeros_like(answer), "output")
            first += sequence.length

    def pack(
        self, chosen: Sequence[Known], spans: Sequence[tuple[int, int]], wrong: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """The rows' inputs side by side; those of wrong drafts are another position's."""
        packed = []
        for number in range(len(chosen[0].inputs)):
            pieces = []
            for sequence, (start, end), count in zip(chosen, spans, wrong):
                x = sequence.inputs[number]
                pieces += [x[start : end - count], x[self.random.sample(range(len(x)), count)]]
            packed.append(torch.cat(pieces))
        return tuple(packed)

    def wanted(self, start: int, end: int) -> list[int]:
        """Grid positions to capture: those from which the sequence may have to go on, and others at random."""
        cell, earliest = self.spec.cell, end - self.spec.draft_room
        passed = range(start - start % cell + cell, end + 1, cell)
        return [position for position in passed if position > earliest - cell or self.random.random() < 0.6]

    def compare(self, found: Tensor, answer: Tensor, what: str) -> None:
        torch.testing.assert_close(
            found.float().cpu(),
            answer.float(),
            rtol=self.tolerance,
            atol=self.tolerance,
            msg=lambda text: f"{what}\n{text}",
        )

    def roll_back(self, index: int, position: int) -> None:
        """Undo all beyond `position`: what was captured there is gone."""
        sequence = self.sequences[index]
        for beyond in [p for p in sequence.slots if p > position]:
            slot = sequence.slots.pop(beyond)
            self.states.poison(Kind.STATE, slot)
            self.free_slots.append(slot)
        sequence.computed = position

    def run_with_drafts(self, most: int) -> None:
        """Rows of up to `most` tokens, of which any but the first may be undone."""
        while going := [i for i, s in enumerate(self.sequences) if s.length - s.computed >= most]:
            counts = {i: self.random.randint(1, most) for i in going}
            self.step(list(counts.items()), {i: self.random.randint(0, count - 1) for i, count in counts.items()})

    def run(self, lengths: Sequence[int]) -> None:
        """Random steps until every sequence is read: rows of the given lengths, some sequences pausing."""
        while unfinished := [i for i, s in enumerate(self.sequences) if s.computed < s.length]:
            going = [i for i in unfinished if self.random.random() < 0.7] or unfinished[:1]
            self.step([(i, min(self.random.choice(lengths), self.remaining(i))) for i in going])

    def remaining(self, index: int) -> int:
        return self.sequences[index].length - self.sequences[index].computed
