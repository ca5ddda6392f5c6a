"""Plans of a few short prompts, and decodes beside them, padded to a size: the inputs of a recorded step.

Padding is rows on scratch units. Every row then has tokens, and every token has a row, so no kernel needs to know
what is not real. Unused pieces lie beyond the last row's end, where there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.base.plan import Captures, Ints, Plan, Sampling
from weft.kernels.interface import NO_SLOT, Batch, Operations
from weft.kernels.rows import RowPositions
from weft.kernels.staging import StagedValue
from weft.memory.kinds import Kind
from weft.memory.spec import MemorySpec
from weft.runner.batching import stage_batch

# Arrays start at multiples of this number of elements, so that their loads are aligned.
ALIGNED = 32


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a recorded step."""

    decodes: int
    longer: int  # rows, at least one of which is padding
    tokens: int  # total of the longer rows
    samples: int | None = None  # None: one for each real row

    @property
    def rows(self) -> int:
        return self.decodes + self.longer

    @property
    def all_tokens(self) -> int:
        return self.decodes + self.tokens

    @property
    def answers(self) -> int:
        """Return the maximum number of samples of real rows."""
        return self.rows - 1 if self.samples is None else self.samples

    def pieces(self, cell: int) -> int:
        """Return the maximum number of pieces of the longer rows, wherever on the grid they lie."""
        return self.tokens // cell + 2 * self.longer

    def holds(self, decodes: int, longer: int, tokens: int, samples: int = 0) -> bool:
        """Return whether a plan of these sizes fits and leaves a token for every row of padding."""
        fits = decodes <= self.decodes and longer < self.longer and samples <= self.answers
        return fits and tokens + self.longer - longer <= self.tokens


def padded(plan: Plan, size: Size, seat: int, cell: int, scratch: Mapping[Kind, int]) -> Plan:
    """Return the plan with padding after its decodes and after its longer rows. `seat` is the board's scratch line."""
    decodes, shift, rows = plan.decode_rows, size.decodes - plan.decode_rows, size.rows

    def spread(values: NDArray[Any], count: int, filling: int) -> Ints:
        out = np.full((count, *values.shape[1:]), filling, np.int32)
        out[:decodes] = values[:decodes]
        out[size.decodes : len(values) + shift] = values[decodes:]
        return out

    def spread_table(table: Ints, kind: Kind) -> Ints:
        # Padding may have more cells than any row.
        more = np.zeros((plan.rows, max(0, -(-size.tokens // cell) - table.shape[1])), np.int32)
        return spread(np.hstack((table, more)), rows, scratch.get(kind, 0))

    start, end = spread(plan.start, rows, 0), spread(plan.end, rows, 1)
    # The last row gets all remaining tokens.
    end[-1] += size.all_tokens - int((end - start).sum())
    captures = plan.captures
    return replace(
        plan,
        seat=spread(plan.seat, rows, seat),
        start=start,
        end=end,
        tokens=spread(plan.tokens, size.all_tokens, 0),
        from_board=spread(plan.from_board, rows, 0),
        read_slot=spread(plan.read_slot, rows, 0),
        tail=spread(plan.tail, rows, scratch.get(Kind.TAIL, 0)),
        page_table=spread_table(plan.page_table, Kind.PAGE),
        window_table=spread_table(plan.window_table, Kind.WINDOW),
        window_first=spread(plan.window_first, rows, 0),
        captures=replace(captures, row=captures.row + np.where(captures.row < decodes, 0, shift).astype(np.int32)),
    )


def trial(start: Ints, end: Ints, spec: MemorySpec, scratch: Mapping[Kind, int]) -> Plan:
    """Return a plan whose rows share one unit of each kind: realistic work with meaningless results."""
    rows, none = len(start), np.zeros(0, np.int32)
    zeros, tokens = np.zeros(rows, np.int32), int((end - start).sum())
    cells = -(-int(end.max()) // spec.cell)
    pages, window_pages = (np.full((rows, cells), scratch.get(k, 0), np.int32) for k in (Kind.PAGE, Kind.WINDOW))
    return Plan(
        number=0, seat=zeros, start=start, end=end, tokens=np.zeros(tokens, np.int32), from_board=zeros,
        read_slot=zeros, tail=zeros + scratch.get(Kind.TAIL, 0), page_table=pages, window_table=window_pages,
        window_first=zeros, captures=Captures(none, none, none), sampled=np.arange(rows, dtype=np.int32),
        sampling=Sampling.greedy(rows), score_index=none, score_token=none, score_top=0,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Inputs of a recorded step: tensors on the device, always at the same addresses."""

    batch: Batch
    seat: Tensor  # [rows] line of the token board
    from_board: Tensor  # [rows] 1: the row's first token is on the board
    answer: Tensor  # [answers] packed index of the token after which a sample is taken
    answer_seat: Tensor  # [answers] seat of its token on the board


def stage_step(
    plan: Plan, size: Size, seat: int, spec: MemorySpec, scratch: Mapping[Kind, int], operations: Operations
) -> StagedValue:
    """Stage the `StepTensors` of a plan that fits. Its host numbers are those of its size, for any plan."""
    wide = padded(plan, size, seat, spec.cell, scratch)
    batch = stage_batch(wide, RowPositions.of(wide, spec.cell), spec, operations)
    fields = batch.fields
    pieces = size.pieces(spec.cell)
    spare = pieces - fields["pieces"]
    beyond = (-(-int(wide.end[-1]) // spec.cell) + np.arange(spare)) * spec.cell
    for name, values in (("piece_row", size.rows - 1), ("piece_position", beyond), ("piece_slot", NO_SLOT)):
        fields[name] = np.concatenate((fields[name], np.full(spare, values)), dtype=np.int32)
    fields |= {"pieces": pieces, "most_pieces": pieces, "longest": size.tokens, "farthest": 0, "host": None}
    last = np.cumsum(wide.end - wide.start) - 1
    real = np.arange(plan.rows)
    real[plan.decode_rows :] += size.decodes - plan.decode_rows
    answer, answer_seat = np.zeros(size.answers, np.int32), np.full(size.answers, seat, np.int32)
    row, index = plan.samples
    # The sample lies as far before the end of its row as in the plan.
    before = (np.cumsum(plan.end - plan.start) - 1)[row] - index
    answer[: len(row)] = last[real[row]] - before
    # A row with drafts leaves no token on the board.
    boarded = plan.drafts[row] == 0 if len(plan.drafts) else np.ones(len(row), np.bool_)
    answer_seat[: len(row)] = np.where(boarded, plan.seat[row], seat)
    seats = {"seat": wide.seat, "from_board": wide.from_board, "answer": answer, "answer_seat": answer_seat}
    return StagedValue(StepTensors, {"batch": batch, **seats})


class StepInputs:
    """Inputs of one size in one buffer, filled by one copy. `cells` is a row's maximum length."""

    def __init__(
        self,
        size: Size,
        seat: int,
        cells: int,
        spec: MemorySpec,
        scratch: Mapping[Kind, int],
        device: torch.device | str,
        operations: Operations,
    ) -> None:
        self.operations = operations
        self.size, self.seat, self.spec, self.scratch, self.device = size, seat, spec, scratch, torch.device(device)
        scratch_plan = trial(np.array([0], np.int32), np.array([2], np.int32), spec, scratch)
        staged = self._stage(replace(scratch_plan, seat=np.array([seat], np.int32)))
        # Padding may be longer than any row.
        new = -(-size.tokens // spec.cell)
        reach = {"full.pages": max(cells, new), "windowed.pages": max(min(cells, spec.window_cells + 2 + new), new)}
        lengths: dict[str, int] = {}
        for name, array in staged.arrays().items():
            lengths[name] = next((size.rows * most for end, most in reach.items() if name.endswith(end)), len(array))
        # Lists of pages come last, the potentially long one at the very end: the unused part is not copied.
        self.names = sorted(lengths, key=lambda name: (name.endswith(".pages"), name.endswith("full.pages")))
        ends = list(accumulate(-(-lengths[name] // ALIGNED) * ALIGNED for name in self.names))
        self.first = dict(zip(self.names, [0, *ends]))
        self.lengths = lengths
        self.buffer = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        views = {name: self.buffer[self.first[name] :][: lengths[name]] for name in self.names}
        self.step: StepTensors = staged.finish(views)
        self._send(staged)

    def fill(self, plan: Plan) -> None:
        """Send a plan that fits. The copy is asynchronous."""
        self._send(self._stage(plan))

    def _stage(self, plan: Plan) -> StagedValue:
        return stage_step(plan, self.size, self.seat, self.spec, self.scratch, self.operations)

    def _send(self, staged: StagedValue) -> None:
        arrays = staged.arrays()
        used = self.first[self.names[-1]] + len(arrays[self.names[-1]])
        pinned = torch.empty(used, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        host = pinned.numpy()
        for name, array in arrays.items():
            assert len(array) <= self.lengths[name], f"{name}: {len(array)} values exceed {self.lengths[name]}"
            host[self.first[name] : self.first[name] + len(array)] = array
        self.buffer[:used].copy_(pinned, non_blocking=True)
