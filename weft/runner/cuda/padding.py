"""Plans of a few short prompts, and decodes beside them, padded to a size: the inputs of a recorded step.

Padding is rows on scratch units. Every token then has a row, so no kernel needs to know what is not real. The last row
is always padding and has all tokens that are left; if all rows are short, that may be none. Unused pieces lie beyond
its end, where there is nothing to do.
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

from weft.base.parts import ranges
from weft.base.plan import NO_DRAFTS, Ints, Plan, Sampling, StepDrafts, row_arrays
from weft.device.staging import StagedValue
from weft.kernels.following import DraftSamples, FollowingRows
from weft.kernels.interface import NO_SLOT, Batch, Operations
from weft.kernels.rows import RowPositions
from weft.memory.kinds import Kind
from weft.memory.spec import MemorySpec
from weft.runner.batching import stage_batch, write_captures
from weft.runner.hidden_states import draft_places

# Arrays start at multiples of this number of elements, so that their loads are aligned.
ALIGNED = 32


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a recorded step. Where it has no decodes, rows of one token are like the longer ones."""

    decodes: int
    longer: int  # rows, the last of which is padding
    tokens: int  # total of the longer rows
    samples: int | None = None  # None: one for each real row
    longest: int | None = None  # real row; None: any

    def __post_init__(self) -> None:
        assert self.tokens > self.longer, "without a plan, one of the longer rows has two tokens and every other one"

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

    def holds(self, decodes: int, longer: int, tokens: int, samples: int = 0, longest: int = 1) -> bool:
        """Return whether a plan of these sizes fits and leaves a token for every row of padding.

        Only kernels of short rows know that the last one may have none.
        """
        if self.longest is not None and longest > self.longest:
            return False
        if not self.decodes:
            decodes, longer, tokens = 0, longer + decodes, tokens + decodes
        fits = decodes <= self.decodes and longer < self.longer and samples <= self.answers
        padding = self.longer - longer if self.longest is None else self.longer - longer - 1
        return fits and tokens + padding <= self.tokens

    def most_drafts(self, rows: int) -> int:
        """Return how many drafts these rows can have in all in a step for drafts, where every token has a sample."""
        if self.longest is None or rows >= self.longer:
            return 0
        # Every row of padding but the last one has a token.
        tokens = min(self.tokens - (self.longer - rows - 1), self.answers)
        return max(0, min(tokens - rows, rows * (self.longest - 1)))


def trial(
    start: Ints,
    end: Ints,
    spec: MemorySpec,
    scratch: Mapping[Kind, int],
    seat: int = 0,
    sampling: Sampling | None = None,
    drafts: StepDrafts = NO_DRAFTS,
) -> Plan:
    """Return a plan whose rows share one unit of each kind: realistic work with meaningless results."""
    rows, cells = len(start), -(-int(end.max()) // spec.cell)
    pages, window_pages = (np.full((rows, cells), scratch.get(k, 0), np.int32) for k in (Kind.PAGE, Kind.WINDOW))
    return Plan.build(
        number=0, start=start, end=end, tokens=np.zeros(int((end - start).sum()), np.int32),
        seat=np.full(rows, seat, np.int32), tail=np.full(rows, scratch.get(Kind.TAIL, 0), np.int32), page_table=pages,
        window_table=window_pages, sampled=np.arange(rows, dtype=np.int32), drafts=drafts,
        sampling=Sampling.greedy(rows) if sampling is None else sampling,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Inputs of a recorded step: tensors on the device, always at the same addresses."""

    batch: Batch
    seat: Tensor  # [rows] line of the token board
    from_board: Tensor  # [rows] 1: the row's first token is on the board
    answer: Tensor  # [answers] packed index of the token after which a sample is taken
    answer_seat: Tensor  # [answers] seat of its token on the board
    # In steps with drafts: rows that follow others in flight, and where samples of drafts are.
    following: FollowingRows | None
    drafts: DraftSamples | None
    # In steps with hidden states: the line of each token there, its place on the board of drafts or -1, and 1 for
    # samples of rows that may end earlier.
    line: Tensor | None = None  # [tokens]
    on_device: Tensor | None = None  # [tokens]
    ends_earlier: Tensor | None = None  # [answers]


class StepInputs:
    """Inputs of one size in one buffer, filled by one copy. `cells` is a row's maximum length.

    With a `padding_line`, every token also has a line of hidden states.

    Rows and tokens lie as follows; the last row has all tokens that are left:

        decodes   padding up to size.decodes   longer rows   padding up to size.rows
    """

    def __init__(
        self,
        size: Size,
        seat: int,
        cells: int,
        spec: MemorySpec,
        scratch: Mapping[Kind, int],
        device: torch.device | str,
        operations: Operations,
        padding_line: int | None = None,
    ) -> None:
        self.padding_line = padding_line
        self.size, self.seat, self.spec, self.scratch, self.device = size, seat, spec, scratch, torch.device(device)
        staged = self._stage_padding(operations)
        arrays = staged.arrays()
        self.pagings = [name for name in ("windowed", "full") if f"batch.{name}.pages" in arrays]
        # Padding may be longer than any row.
        new = -(-size.tokens // spec.cell)
        reach = {"full": max(cells, new), "windowed": max(min(cells, spec.window_cells + 2 + new), new)}
        self.lengths = {name: len(array) for name, array in arrays.items()}
        self.lengths |= {f"batch.{paging}.pages": size.rows * reach[paging] for paging in self.pagings}
        # Lists of pages come last, the potentially long one at the very end: the unused part is not copied.
        names = sorted(self.lengths, key=lambda name: (name.endswith(".pages"), name.endswith("full.pages")))
        ends = list(accumulate(-(-self.lengths[name] // ALIGNED) * ALIGNED for name in names))
        self.first = dict(zip(names, [0, *ends]))
        # Everything before the lists of pages, as it is without any real row.
        lists = [self.first[f"batch.{paging}.pages"] for paging in self.pagings]
        self.padding = np.zeros(min(lists, default=ends[-1]), np.int32)
        for name, array in arrays.items():
            if self.first[name] < len(self.padding):
                self.padding[self.first[name] :][: len(array)] = array
        self.buffer = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        views = {name: self.buffer[self.first[name] :][: self.lengths[name]] for name in names}
        step: StepTensors = staged.finish(views)
        if step.drafts is not None:
            step = replace(step, drafts=replace(step.drafts, seat=step.seat, token=step.batch.first[:-1]))
        self.step = step
        self.fill(trial(np.array([0], np.int32), np.array([2], np.int32), spec, scratch, seat))

    def _stage_padding(self, operations: Operations) -> StagedValue:
        """Stage the `StepTensors` of a step without real rows. Its host numbers are those of its size, for any plan."""
        size, cell = self.size, self.spec.cell
        end = np.ones(size.rows, np.int32)
        # One longer row, because a row of one token is a decode.
        end[size.decodes] = 2
        end[-1] += size.all_tokens - int(end.sum())
        plan = trial(np.zeros(size.rows, np.int32), end, self.spec, self.scratch)
        batch = stage_batch(plan, RowPositions.of(plan, cell), self.spec, operations)
        pieces = size.pieces(cell)
        every = np.full(pieces, NO_SLOT, np.int32)
        batch.fields.update(dict.fromkeys(("piece_row", "piece_position", "piece_slot"), every))
        batch.fields.update(pieces=pieces, most_pieces=pieces, farthest=0, host=None)
        batch.fields["longest"] = size.tokens if size.longest is None else size.longest
        batch.fields["positions"] = np.zeros(size.all_tokens, np.int32)
        rows, answers = np.zeros(size.rows, np.int32), np.zeros(size.answers, np.int32)
        seats = {"seat": rows + self.seat, "from_board": rows, "answer": answers, "answer_seat": answers + self.seat}
        if self.padding_line is not None:
            seats["line"] = np.full(size.all_tokens, self.padding_line, np.int32)
            seats |= {"on_device": np.full(size.all_tokens, -1, np.int32), "ends_earlier": answers}
        return StagedValue(StepTensors, {"batch": batch, **seats, **self._stage_drafts()})

    @property
    def builds_on_flight(self) -> bool:
        """Return whether rows may follow drafts in flight. With those, a row reaches one grid position at most."""
        return self.size.samples is not None and 2 * self.spec.draft_room + 1 <= self.spec.cell

    @property
    def verifies(self) -> bool:
        """Return whether there may be drafts, so that the device verifies them."""
        return self.spec.draft_room > 0

    @property
    def width(self) -> int:
        """Return the number of drafts that a row may need: those in flight, and its drafts."""
        return 2 * self.spec.draft_room

    def _stage_drafts(self) -> dict[str, StagedValue | None]:
        if not self.verifies:
            return {"following": None, "drafts": None}
        size = self.size
        none = np.zeros(size.rows, np.int32)
        lines = np.zeros(size.longer * self.width, np.int32)
        rows: dict[str, Any] = {"unverified": none, "earlier_slot": none, "capture": none + NO_SLOT, "drafts": lines}
        # The seats and first tokens of rows are known to the step.
        drafts = {"seat": None, "token": None, "sample": none, "count": none, "most": self.spec.draft_room}
        following = StagedValue(FollowingRows, {**rows, "width": self.width}) if self.builds_on_flight else None
        return {"following": following, "drafts": StagedValue(DraftSamples, drafts)}

    def fill(self, plan: Plan, lines: Ints | None = None) -> None:
        """Send a plan that fits, and the lines of its tokens' hidden states. The copy is asynchronous."""
        filling = Filling(self, plan, lines)
        pinned = torch.empty(filling.used, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        filling.write(pinned.numpy())
        self.buffer[: filling.used].copy_(pinned, non_blocking=True)


class Filling:
    """Writes one plan into the inputs of its size. What is the same for every plan comes from the padding."""

    def __init__(self, inputs: StepInputs, plan: Plan, lines: Ints | None) -> None:
        self.inputs, self.plan, size, cell = inputs, plan, inputs.size, inputs.spec.cell
        self.lines = lines
        self.decodes = plan.decode_rows if size.decodes else 0
        self.longer = plan.rows - self.decodes
        self.start, self.end = plan.start.astype(np.int64), plan.end.astype(np.int64)
        # Rows of padding before the last one, and the tokens of that one.
        self.single = size.longer - self.longer - 1
        self.rest = size.tokens - (len(plan.tokens) - self.decodes) - self.single
        assert self.single >= 0 <= self.rest, f"a plan of {plan.rows} rows does not fit into {size}"
        # Pages of padding after the longer rows, and of each row.
        self.rest_pages = -(-self.rest // cell)
        self.pages = {paging: -(-self.end // cell) - self.first_cell(paging) for paging in inputs.pagings}
        last = inputs.pagings[-1] if inputs.pagings else None
        self.used = len(inputs.padding) if last is None else inputs.first[f"batch.{last}.pages"] + self.page_count(last)

    def first_cell(self, paging: str) -> NDArray[np.int64] | int:
        return self.plan.window_first.astype(np.int64) if paging == "windowed" else 0

    def page_count(self, paging: str) -> int:
        padding = self.inputs.size.decodes - self.decodes + self.single + self.rest_pages
        return int(self.pages[paging].sum()) + padding

    def write(self, host: NDArray[np.int32]) -> None:
        plan, cell = self.plan, self.inputs.spec.cell
        host[: len(self.inputs.padding)] = self.inputs.padding
        self._put(host, "seat", plan.seat)
        self._put(host, "from_board", plan.from_board)
        # Rows without a checkpoint may have any index in the plan.
        self._put(host, "batch.slot", np.where(plan.start >= cell, plan.read_slot, 0))
        for name in row_arrays(Plan, "kernels"):
            self._put(host, f"batch.{name}", getattr(plan, name))
        self._put(host, "batch.token_ids", plan.tokens)
        if self.lines is not None:
            self._put(host, "line", self.lines)
            self._write_on_device(host)
        positions, owners = ranges(self.start, self.end - self.start)
        self._put(host, "batch.positions", positions)
        end = self.inputs.first["batch.positions"] + self.inputs.size.all_tokens
        host[end - self.rest : end] = np.arange(self.rest)
        self._put_counts(host, "batch.first", self.end - self.start, self.rest)
        self._write_pieces(host)
        for paging in self.inputs.pagings:
            self._write_pages(host, paging, positions, owners)
        self._write_answers(host)
        if self.inputs.verifies and len(plan.drafts.counts):
            self._write_drafts(host)

    def _write_on_device(self, host: NDArray[np.int32]) -> None:
        """Write where tokens that only the device knows are, and which rows end where it knows."""
        plan = self.plan
        if len(plan.drafts.on_device):
            self._put(host, "on_device", draft_places(plan))
        if len(plan.drafts.unverified_inside):
            inside = plan.drafts.unverified_inside[plan.sampled]
            host[self.inputs.first["ends_earlier"] :][: len(inside)] = inside > 0

    def _write_drafts(self, host: NDArray[np.int32]) -> None:
        """Write where drafts are, and if rows follow others in flight, what they need to be moved."""
        plan, inputs = self.plan, self.inputs
        samples = plan.drafts.counts.astype(np.int64) + 1
        self._put(host, "drafts.count", plan.drafts.counts)
        self._put(host, "drafts.sample", np.cumsum(samples) - samples)
        if not plan.drafts.may_move:
            return
        self._put(host, "following.unverified", plan.drafts.unverified_before)
        self._put(host, "following.earlier_slot", plan.drafts.earlier_slot)
        capture = np.full(plan.rows, NO_SLOT, np.int32)
        capture[plan.captures.row] = plan.captures.slot
        self._put(host, "following.capture", capture)
        # Earlier drafts than a row's own are at the end of their line in the plan.
        rows, length = np.flatnonzero(plan.drafts.unverified_before), self.end - self.start
        place = np.arange(inputs.width) - plan.drafts.unverified_before[rows, None]
        first = (np.cumsum(length) - length)[rows, None] + 1
        drafts = plan.tokens[np.clip(first + place, 0, len(plan.tokens) - 1)]
        earlier = plan.drafts.earlier_tokens[rows[:, None], np.minimum(place, -1) + plan.drafts.earlier_tokens.shape[1]]
        lines = host[inputs.first["following.drafts"] :][: inputs.size.longer * inputs.width]
        lines.reshape(-1, inputs.width)[rows - self.decodes] = np.where(place < 0, earlier, drafts)

    def _put(self, host: NDArray[np.int32], name: str, values: NDArray[Any]) -> None:
        """Write values of rows or of tokens: those of decodes, and behind the padding those of longer rows."""
        first, decodes = self.inputs.first[name], self.decodes
        if decodes:
            host[first : first + decodes] = values[:decodes]
        first += self.inputs.size.decodes
        host[first : first + len(values) - decodes] = values[decodes:]

    def _put_counts(self, host: NDArray[np.int32], name: str, counts: NDArray[np.int64], rest: int) -> None:
        """Write where each row begins, and the total. A row of padding counts for one, the last one for `rest`."""
        size, every = self.inputs.size, np.ones(self.inputs.size.rows, np.int64)
        every[: self.decodes] = counts[: self.decodes]
        every[size.decodes : size.decodes + self.longer] = counts[self.decodes :]
        every[-1] = rest
        first = self.inputs.first[name]
        host[first] = 0
        np.cumsum(every, out=host[first + 1 : first + 1 + len(every)], dtype=np.int32)

    def _write_pieces(self, host: NDArray[np.int32]) -> None:
        size, cell, first = self.inputs.size, self.inputs.spec.cell, self.inputs.first
        start, end = self.start[self.decodes :] // cell, (self.end[self.decodes :] - 1) // cell
        counts = end - start + 1
        number, owner = ranges(start, counts)
        used, single, pieces = len(number), self.single, size.pieces(cell)
        row, position, slot = (host[first[f"batch.piece_{name}"] :][:pieces] for name in ("row", "position", "slot"))
        row[:used] = owner + size.decodes
        row[used : used + single] = np.arange(size.rows - 1 - single, size.rows - 1)
        # The last row's pieces, and those that are left, which lie beyond its end.
        row[used + single :] = size.rows - 1
        position[:used] = number * cell
        position[used : used + single] = 0
        position[used + single :] = np.arange(pieces - used - single) * cell
        begins = host[first["batch.first_piece"] :][: size.longer + 1]
        begins[0] = 0
        np.cumsum(counts, out=begins[1 : self.longer + 1], dtype=np.int32)
        begins[self.longer + 1 :] = used + 1 + np.arange(single + 1)
        begins[-1] = used + single + self.rest_pages
        captures = self.plan.captures
        if self.plan.drafts.may_move:
            # The device cuts all longer rows.
            captures = captures.of(captures.row < self.decodes)
        if len(captures.row):
            closing = host[first["batch.closing"] :][: size.rows]
            write_captures(captures, self.decodes, self.start, cell, begins, slot, closing)

    def _write_pages(
        self, host: NDArray[np.int32], paging: str, positions: NDArray[np.int64], owners: NDArray[np.int64]
    ) -> None:
        windowed, cell = paging == "windowed", self.inputs.spec.cell
        table = self.plan.window_table if windowed else self.plan.page_table
        column = positions // cell
        if windowed:
            self._put(host, f"batch.{paging}.first_position", self.plan.window_first * cell)
            column -= self.plan.window_first[owners]
        self._put(host, f"batch.{paging}.write_page", table[owners, column])
        counts = self.pages[paging]
        self._put_counts(host, f"batch.{paging}.bounds", counts, self.rest_pages)
        listed = table[np.arange(table.shape[1]) < counts[:, None]]
        of_decodes = int(counts[: self.decodes].sum())
        first, padding = self.inputs.first[f"batch.{paging}.pages"], self.inputs.size.decodes - self.decodes
        pages = host[first : first + self.page_count(paging)]
        pages[:of_decodes] = listed[:of_decodes]
        scratch = self.inputs.scratch[Kind.WINDOW if windowed else Kind.PAGE]
        pages[of_decodes : of_decodes + padding] = scratch
        pages[of_decodes + padding : len(listed) + padding] = listed[of_decodes:]
        pages[len(listed) + padding :] = scratch

    def _write_answers(self, host: NDArray[np.int32]) -> None:
        plan, first = self.plan, self.inputs.first
        row, index = plan.samples
        shift = self.inputs.size.decodes - self.decodes
        host[first["answer"] :][: len(row)] = index + np.where(index < self.decodes, 0, shift) if shift else index
        seats = plan.seat[row]
        # A row with drafts leaves no token on the board.
        boarded = np.where(plan.drafts.counts[row] == 0, seats, self.inputs.seat) if len(plan.drafts.counts) else seats
        host[first["answer_seat"] :][: len(row)] = boarded
